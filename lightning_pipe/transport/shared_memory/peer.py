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
import select
import socket
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

_PACKET = struct.Struct("<BIIQ")  # kind, tag, number of the buffer, bytes of the message; then numbers of free buffers
_NUMBER = struct.Struct("<I")
_TIME = struct.Struct("@ll")  # the system's seconds and microseconds
_MESSAGE, _FREE, _MEMORY = 0, 1, 2
_SMALLEST = 4096
_MOST_AT_ONCE = 256
_MOST_KEPT, _MOST_BYTES_KEPT = 16, 1 << 18
"""Buffers that a receiver has read and not given back yet: their numbers travel with its next message."""
_UNREAD = 1 << 20
"""Bytes of the system's memory for packets that nobody has read, 768 for each; the system may allow less."""
_GLANCE = 50
"""Milliseconds between two tries: the system says that there is room when three quarters are free, not one packet."""
_LONGEST = _PACKET.size + _NUMBER.size * _MOST_KEPT


class Buffer(NamedTuple):
    """A piece of memory that both processes map."""

    number: int
    size: int
    address: int
    memory: Tensor

    @classmethod
    def map(cls, first: int, size: int, descriptor: int) -> list[Buffer]:
        """The buffers in a memory file, numbered from ``first`` on; the descriptor may be closed afterwards."""
        memory = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
        address = memory.data_ptr()
        return [cls(first + i, size, address + i * size, memory) for i in range(memory.numel() // size)]


class PostedReceive:
    """A receive that was posted.

    Args:
        data: gets the message: a flat tensor of bytes of its size.

    Attributes:
        done: whether it has come.
    """

    __slots__ = ("data", "done")

    def __init__(self, data: Tensor) -> None:
        self.data, self.done = data, False


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
        self._socket = connection
        self._timeout = timeout
        self._gone = False
        self._reason: OSError = ConnectionResetError("Connection closed by peer")
        self._own: list[Buffer] = []
        self._free: defaultdict[int, list[Buffer]] = defaultdict(list)
        self._mapped: list[Buffer] = []
        self._read_out: list[Buffer] = []
        self._kept_bytes = 0
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
        capacity = max(_SMALLEST, 1 << (size - 1).bit_length())
        free = self._free[capacity]
        if not free:
            while self._read_packet(socket.MSG_DONTWAIT):  # some of them may give buffers back
                pass
        if self._gone:
            raise self._reason
        if not free:
            self._grow(capacity)
        buffer = free[-1]
        write(buffer.address)  # if it raises, the buffer is still free
        free.pop()
        self._write(_PACKET.pack(_MESSAGE, tag, buffer.number, size) + self._given_back())

    def post(self, posted: PostedReceive, tag: int) -> None:
        """Post a receive; it may be done at once."""
        if len(self._read_out) >= _MOST_KEPT or self._kept_bytes > _MOST_BYTES_KEPT:
            with suppress(ConnectionError):  # a peer that has ended needs no buffers back
                self._write(_PACKET.pack(_FREE, 0, 0, 0) + self._given_back())
        if self._arrived[tag]:
            self._copy(*self._arrived[tag].popleft(), posted)
        else:
            self._posted[tag].append(posted)

    def wait(self, posted: PostedReceive) -> None:
        """Wait for a message.

        Raises:
            TimeoutError: it did not come within the timeout.
            OSError: the other process has gone, or its memory cannot be mapped.
        """
        while not posted.done:
            came = self._read_packet()  # maybe another message
            if self._gone:
                raise self._reason
            if not came:
                raise TimeoutError("timed out")

    def shutdown(self) -> None:
        """End the connection for both processes; may be called from any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the peer still reads what was sent."""
        self._socket.close()

    def _grow(self, capacity: int) -> None:
        """Double the buffers of a size, in one file; the system provides memory only where it is written."""
        count = min(max(1, sum(buffer.size == capacity for buffer in self._own)), _MOST_AT_ONCE)
        descriptor = os.memfd_create("lightning-pipe")
        try:
            os.ftruncate(descriptor, count * capacity)
            buffers = Buffer.map(len(self._own), capacity, descriptor)
            self._write(_PACKET.pack(_MEMORY, 0, buffers[0].number, capacity))
            self._write(b"+", descriptor)  # alone: to receive a descriptor costs more than to receive bytes
        finally:
            os.close(descriptor)
        self._own += buffers
        self._free[capacity] += buffers

    def _read_packet(self, flags: int = 0) -> bool:
        """Take in the next packet; whether there was one within the timeout, or at once with ``MSG_DONTWAIT``."""
        if self._gone:
            return False
        try:
            packet = self._socket.recv(_LONGEST, flags)
        except BlockingIOError:
            return False
        except OSError:
            packet = b""
        if not packet:
            self._gone = True
            return False
        kind, tag, number, size = _PACKET.unpack_from(packet)
        if len(packet) > _PACKET.size:
            for (free,) in _NUMBER.iter_unpack(packet[_PACKET.size :]):
                buffer = self._own[free]
                self._free[buffer.size].append(buffer)
        if kind == _MESSAGE:
            if self._posted[tag]:
                self._copy(self._mapped[number], size, self._posted[tag].popleft())
            else:
                self._arrived[tag].append((self._mapped[number], size))
        elif kind == _MEMORY:
            self._map(number, size)
        return not self._gone

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
        self._gone = len(self._mapped) <= number

    def _copy(self, buffer: Buffer, size: int, posted: PostedReceive) -> None:
        """Copy a message out of its buffer."""
        expected = posted.data.numel()
        if size != expected:
            raise ConnectionError(f"{size} bytes were sent, {expected} expected: the ranks disagree")
        ctypes.memmove(posted.data.data_ptr(), buffer.address, size)
        posted.done = True
        self._read_out.append(buffer)
        self._kept_bytes += buffer.size

    def _given_back(self) -> bytes:
        """The numbers of the buffers that the peer may use again, at the end of a packet."""
        if not self._read_out:
            return b""
        given = self._read_out[:_MOST_KEPT]
        del self._read_out[:_MOST_KEPT]
        self._kept_bytes -= sum(buffer.size for buffer in given)
        return b"".join(_NUMBER.pack(buffer.number) for buffer in given)

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
            ready = select.poll()
            ready.register(self._socket, select.POLLIN | select.POLLOUT)
            ready.poll(_GLANCE)
            while self._read_packet(socket.MSG_DONTWAIT):
                pass
            if self._gone:
                raise self._reason
