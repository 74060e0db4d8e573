"""One end of the connection between two processes of a host; `lightning_pipe.transport.shared_memory` draws a hop.

Gloo moves every message with threads of its own at both ends and two control messages; where processes share the
cores, these threads take the time of those that compute. Here a send copies into memory that both processes map and
writes a few bytes to a socket, and the receiver reads them when it waits. No thread is involved, and a message costs a
tenth. This needs Linux (``memfd_create``).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

_PACKET = struct.Struct("<BIIQ")  # kind, tag, number of the buffer, bytes of the message
_TIME = struct.Struct("@ll")  # the system's seconds and microseconds
_MESSAGE, _MEMORY = 0, 1
_SMALLEST = 4096
_MARKS = 4096
"""Bytes before the buffers of a file: for each of them a mark, which is 1 as long as it has an unread message."""
_MOST_AT_ONCE = 256
_UNREAD = 1 << 20
"""Bytes of the system's memory for packets that nobody has read, 768 for each; the system may allow less."""
_BARRIER = threading.Lock()
_GLANCE = 1e-3
"""Seconds between two tries: the system says that there is room when three quarters are free, not one packet."""
_AWAKE = 3e-3
"""Seconds for which a wait looks again and again before it sleeps: to wake a core takes as long as a tiny layer."""


class Buffer(NamedTuple):
    """A piece of memory that both processes map; ``mark`` is the place in its file that says whether it is unread."""

    number: int
    address: int
    file: mmap.mmap
    mark: int

    @classmethod
    def map(cls, first: int, size: int, descriptor: int) -> list[Buffer]:
        """The buffers in a memory file, numbered from ``first`` on; the descriptor may be closed afterwards."""
        file = mmap.mmap(descriptor, 0)
        address = ctypes.addressof(ctypes.c_char.from_buffer(file)) + _MARKS
        return [cls(first + i, address + i * size, file, i) for i in range((len(file) - _MARKS) // size)]


class PostedReceive:
    """A receive that was posted.

    Args:
        peer: the connection.
        size: bytes of the message.
        take: copies it from an address.

    Attributes:
        came: its buffer and its bytes, once it has come.
    """

    __slots__ = ("_peer", "_size", "_take", "came")

    def __init__(self, peer: SharedMemoryPeer, size: int, take: Callable[[int], Any]) -> None:
        self._peer, self._size, self._take = peer, size, take
        self.came: tuple[Buffer, int] | None = None

    def wait(self) -> Any:
        """Wait for the message, once, and take it out of its buffer, which is free then; returns what ``take`` does.

        Raises:
            TimeoutError: it did not come within the timeout.
            OSError: the other process has gone, its memory cannot be mapped, or it has sent another size.
        """
        until = time.monotonic() + _AWAKE
        while self.came is None:
            if time.monotonic() < until:
                if not self._peer.read(socket.MSG_DONTWAIT):
                    os.sched_yield()  # who else waits for this core goes first
            elif not self._peer.read():
                raise TimeoutError("timed out")
        buffer, size = self.came
        if size != self._size:
            raise ConnectionError(f"{size} bytes were sent, {self._size} expected: the ranks disagree")
        taken = self._take(buffer.address)
        # Processors such as ARM's may let a read be late and a later write be early; a lock's release ends all reads
        # before it, and its next acquisition begins all writes behind it.
        for _ in range(2):
            with _BARRIER:
                pass
        buffer.file[buffer.mark] = 0  # as soon as the other process sees it, it may write there
        return taken


class SharedMemoryPeer:
    """The connection to one other process of this host.

    Messages with the same tag keep their order; those with different tags do not wait for each other. A send is done
    when it returns: its memory comes back when the receiver has copied the message. Only when hundreds of packets are
    unread does a send wait for the peer.

    Args:
        connection: a connected socket of type ``SOCK_SEQPACKET``.
        timeout: the longest that an operation waits, in seconds.
    """

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        # with the limit in the socket a wait is one system call; what must not wait passes MSG_DONTWAIT
        longest = _TIME.pack(*divmod(max(1, round(timeout * 1e6)), 10**6))
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, longest)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD)
        self._socket, self._timeout = connection, timeout
        self._gone = False
        self._reason: OSError = ConnectionResetError("Connection closed by peer")
        self._own: defaultdict[int, list[Buffer]] = defaultdict(list)  # by size
        self._mapped: list[Buffer] = []
        self._posted: defaultdict[int, deque[PostedReceive]] = defaultdict(deque)
        self._arrived: defaultdict[int, deque[tuple[Buffer, int]]] = defaultdict(deque)

    def hand_over(self, size: int, write: Callable[[int], Any], tag: int) -> None:
        """Hand over a message.

        Args:
            size: its bytes.
            write: writes it to an address.
            tag: tells messages apart.

        Raises:
            OSError: the other process has gone, or has read nothing for the timeout.
        """
        if self._gone:
            raise self._reason
        buffer = self._unmarked(max(_SMALLEST, 1 << (size - 1).bit_length()))
        write(buffer.address)  # if it raises, the buffer is still free
        buffer.file[buffer.mark] = 1
        self._write(_PACKET.pack(_MESSAGE, tag, buffer.number, size))

    def post(self, size: int, take: Callable[[int], Any], tag: int) -> PostedReceive:
        """Post a receive, as `hand_over` sends."""
        posted = PostedReceive(self, size, take)
        if self._arrived[tag]:
            posted.came = self._arrived[tag].popleft()
        else:
            self._posted[tag].append(posted)
        return posted

    def shutdown(self) -> None:
        """End the connection for both processes; may be called from any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the peer still reads what was sent."""
        self._socket.close()

    def _unmarked(self, size: int) -> Buffer:
        """A buffer of a size whose last message has been read."""
        buffers = self._own[size]
        for buffer in buffers:  # the first ones first: others may never be written
            if not buffer.file[buffer.mark]:
                return buffer
        self._grow(size)
        return buffers[-1]

    def _grow(self, size: int) -> None:
        """Double the buffers of a size, in one file; the system provides memory only where it is written."""
        count = min(max(1, len(self._own[size])), _MOST_AT_ONCE)
        descriptor = os.memfd_create("lightning-pipe")
        try:
            os.ftruncate(descriptor, _MARKS + count * size)
            buffers = Buffer.map(sum(map(len, self._own.values())), size, descriptor)
            self._write(_PACKET.pack(_MEMORY, 0, buffers[0].number, size))
            self._write(b"+", descriptor)  # alone: to receive a descriptor costs more than to receive bytes
        finally:
            os.close(descriptor)
        self._own[size] += buffers

    def read(self, flags: int = 0) -> bool:
        """Take in the next packet; whether there was one within the timeout, or at once with ``MSG_DONTWAIT``.

        Raises:
            OSError: the other process has gone, or its memory cannot be mapped.
        """
        try:
            packet = b"" if self._gone else self._socket.recv(_PACKET.size, flags)
        except BlockingIOError:
            return False
        except OSError:
            packet = b""
        if not packet:
            self._gone = True
            raise self._reason
        kind, tag, number, size = _PACKET.unpack(packet)
        if kind == _MEMORY:
            self._map(number, size)
        elif self._posted[tag]:
            self._posted[tag].popleft().came = self._mapped[number], size
        else:
            self._arrived[tag].append((self._mapped[number], size))
        return True

    def _map(self, number: int, size: int) -> None:
        """Take in memory that the peer has made."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        try:
            # a process that may open no more files gets the packet without its descriptor
            if data and not descriptors:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            for descriptor in descriptors:
                self._mapped += Buffer.map(number, size, descriptor)
        except OSError as error:
            self._reason = error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if len(self._mapped) <= number:
            self._gone = True
            raise self._reason

    def _write(self, packet: bytes, *descriptors: int) -> None:
        """Write a packet; while the socket is full, read: the peer may be writing as well."""
        limit: float | None = None
        while True:
            try:
                if descriptors:
                    socket.send_fds(self._socket, [packet], descriptors, socket.MSG_DONTWAIT)
                else:
                    self._socket.send(packet, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                limit = limit or time.monotonic() + self._timeout
            if time.monotonic() > limit:
                raise TimeoutError("timed out: hundreds of messages are unread")
            time.sleep(_GLANCE)
            while self.read(socket.MSG_DONTWAIT):
                pass
