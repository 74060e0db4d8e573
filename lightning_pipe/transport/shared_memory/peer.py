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
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipe.transport.failures import joined_threads

_PACKET = struct.Struct("<BIIQ")  # kind, tag, number of the buffer, bytes of the message; then numbers of free buffers
_NUMBER = struct.Struct("<I")
_TIME = struct.Struct("@ll")  # the system's seconds and microseconds
_MESSAGE, _FREE, _MEMORY = 0, 1, 2
_SMALLEST = 4096
_MOST_AT_ONCE = 256
_MOST_KEPT, _MOST_BYTES_KEPT = 16, 1 << 18
"""Buffers that a receiver has read and not given back yet: their numbers travel with its next message."""
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
    when it returns: its memory comes back when the receiver has copied the message.

    Args:
        connection: a connected socket of type ``SOCK_SEQPACKET``.
        timeout: the longest that `wait` waits, in seconds.
    """

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        # with the limit in the socket a wait is one system call; reads that must not wait pass MSG_DONTWAIT
        longest = _TIME.pack(*divmod(max(1, round(timeout * 1e6)), 10**6))
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, longest)
        self._socket = connection
        self._timeout = timeout
        self._gone = False
        self._reason: OSError = ConnectionResetError("Connection closed by peer")
        self._own: list[Buffer] = []
        self._free: defaultdict[int, list[Buffer]] = defaultdict(list)
        self._mapped: list[Buffer] = []
        self._read_out: list[Buffer] = []
        self._posted: defaultdict[int, deque[PostedReceive]] = defaultdict(deque)
        self._arrived: defaultdict[int, deque[tuple[Buffer, int]]] = defaultdict(deque)
        self._lock = threading.Lock()
        self._backlog: deque[bytes | int] = deque()  # packets and descriptors
        self._writer: threading.Thread | None = None

    def send(self, data: Tensor, tag: int) -> None:
        """Hand over a flat tensor of bytes; see `hand_over`."""
        self.hand_over(data.numel(), lambda address: ctypes.memmove(address, data.data_ptr(), data.numel()), tag)

    def hand_over(self, size: int, write: Callable[[int], Any], tag: int) -> None:
        """Hand over a message.

        Args:
            size: its bytes.
            write: writes it to an address.
            tag: tells messages apart.

        Raises:
            ConnectionError: the other process has gone.
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

    def receive(self, data: Tensor, tag: int) -> PostedReceive:
        """Post a receive into a flat tensor of bytes, which has the message's size."""
        posted = PostedReceive(data)
        self._posted[tag].append(posted)
        if self._arrived[tag]:
            self._deliver(tag)
        return posted

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
        """Write the messages that are left and close the connection."""
        # buffers that are given back now are of no use, and a peer that has ended reads no packets
        with self._lock:
            kept = [item for item in self._backlog if not (isinstance(item, bytes) and item[0] == _FREE)]
            self._backlog = deque(kept)
            writer = self._writer
        if writer is not None:
            writer.join(self._timeout)
        self._socket.close()

    def _grow(self, capacity: int) -> None:
        """Double the buffers of a size, in one file; the system provides memory only where it is written."""
        count = min(max(1, sum(buffer.size == capacity for buffer in self._own)), _MOST_AT_ONCE)
        descriptor = _memory_file(count * capacity)
        buffers = Buffer.map(len(self._own), capacity, descriptor)
        self._own += buffers
        self._free[capacity] += buffers
        self._write(_PACKET.pack(_MEMORY, 0, buffers[0].number, capacity), descriptor)

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
        for (free,) in _NUMBER.iter_unpack(packet[_PACKET.size :]):
            buffer = self._own[free]
            self._free[buffer.size].append(buffer)
        if kind == _MESSAGE:
            self._arrived[tag].append((self._mapped[number], size))
            if self._posted[tag]:
                self._deliver(tag)
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

    def _deliver(self, tag: int) -> None:
        """Give the oldest message of a tag to its oldest receive."""
        buffer, size = self._arrived[tag].popleft()
        posted = self._posted[tag].popleft()
        expected = posted.data.numel()
        if size != expected:
            raise ConnectionError(f"{size} bytes were sent, {expected} expected: the ranks disagree")
        ctypes.memmove(posted.data.data_ptr(), buffer.address, size)
        posted.done = True
        self._read_out.append(buffer)
        if len(self._read_out) == _MOST_KEPT or sum(each.size for each in self._read_out) > _MOST_BYTES_KEPT:
            with suppress(ConnectionError):  # a peer that has ended needs no buffers back
                self._write(_PACKET.pack(_FREE, 0, 0, 0) + self._given_back())

    def _given_back(self) -> bytes:
        """The numbers of the buffers that the peer may use again, at the end of a packet."""
        if not self._read_out:
            return b""
        numbers = b"".join(_NUMBER.pack(buffer.number) for buffer in self._read_out)
        self._read_out.clear()
        return numbers

    def _write(self, *items: bytes | int) -> None:
        """Write packets and descriptors, or leave them to a thread while the socket is full.

        A socket is full when some hundred packets are unread. A descriptor has a packet of its own: to receive one
        costs more than to receive bytes.
        """
        with self._lock:
            # behind what is waiting already: packets keep their order
            self._backlog.extend(items)
            if self._writer is None and not self._flush():
                self._writer = joined_threads.start("writer", self._drain, self.shutdown)

    def _flush(self) -> bool:
        """Write as far as the socket takes it; whether nothing is left."""
        try:
            while self._backlog:
                item = self._backlog[0]
                if isinstance(item, bytes):
                    self._socket.send(item, socket.MSG_DONTWAIT)
                else:
                    socket.send_fds(self._socket, [b"+"], [item], socket.MSG_DONTWAIT)
                    os.close(item)
                self._backlog.popleft()
        except BlockingIOError:
            return False
        except OSError:
            for left in self._backlog:
                if isinstance(left, int):
                    os.close(left)
            self._backlog.clear()
            raise
        return True

    def _drain(self) -> None:
        ready = select.poll()
        ready.register(self._socket, select.POLLOUT)
        with suppress(OSError):  # the main thread finds out when it reads
            while True:
                ready.poll(100)
                with self._lock:
                    if self._flush():
                        self._writer = None
                        return


def _memory_file(size: int) -> int:
    """A file in memory."""
    descriptor = os.memfd_create("lightning-pipe")
    os.ftruncate(descriptor, size)
    return descriptor
