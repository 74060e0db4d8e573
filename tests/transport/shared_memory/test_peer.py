"""Messages through shared memory: both ends in this process, without a world around them."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_pipe.transport.base import Lane, Transport
from lightning_pipe.transport.shared_memory import peer, rendezvous
from lightning_pipe.transport.shared_memory.peer import SharedMemoryPeer
from lightning_pipe.transport.topology import Topology
from tests.support import processes

Pair = tuple[SharedMemoryPeer, SharedMemoryPeer]


@pytest.fixture
def pair() -> Iterator[Pair]:
    sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    first, second = (SharedMemoryPeer(each, timeout=0.2) for each in sockets)
    yield first, second
    first.close()
    second.close()


def message(value: int, size: int) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def send(end: SharedMemoryPeer, data: Tensor, tag: int) -> None:
    end.hand_over(data.numel(), lambda address: ctypes.memmove(address, data.data_ptr(), data.numel()), tag)


def post(end: SharedMemoryPeer, data: Tensor, tag: int) -> peer.PostedReceive:
    return end.post(data.numel(), lambda address: ctypes.memmove(data.data_ptr(), address, data.numel()), tag)


def buffers(end: SharedMemoryPeer) -> int:
    return sum(map(len, end._own.values()))


def test_memory_is_used_again(pair: Pair) -> None:
    first, second = pair
    data = message(0, 1 << 16)
    for value in range(50):
        send(first, message(value, 1 << 16), 0)
        post(second, data, 0).wait()
        assert data[-1] == value
    assert buffers(first) == 1
    before = len(os.listdir("/proc/self/fd"))
    for value in range(100):
        send(first, message(value, 1 << 16), 0)
    for _ in range(100):
        post(second, data, 0).wait()
    assert buffers(first) == 128  # as many as were under way at once, in steps of two
    # A mapping keeps a descriptor; there is one per step at each end, not one per message.
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * 7


def test_sizes_that_differ_raise(pair: Pair) -> None:
    first, second = pair
    send(first, message(1, 3), 0)
    with pytest.raises(ConnectionError, match="3 bytes were sent, 4 expected"):
        post(second, message(0, 4), 0).wait()


def test_a_message_that_cannot_be_written_leaves_no_trace(pair: Pair) -> None:
    first, second = pair

    def fail(address: int) -> None:
        raise MemoryError

    for _ in range(10):
        with pytest.raises(MemoryError):
            first.hand_over(100, fail, 0)
    send(first, message(7, 100), 0)
    data = message(0, 100)
    post(second, data, 0).wait()
    assert data.unique().tolist() == [7]
    assert buffers(first) == 1


def test_what_was_sent_before_the_end_still_arrives(pair: Pair) -> None:
    first, second = pair
    send(first, message(7, 4), 0)
    first.close()
    data = message(0, 4)
    post(second, data, 0).wait()
    assert data.tolist() == [7] * 4
    with pytest.raises(ConnectionError, match="closed by peer"):
        post(second, data, 0).wait()
    with pytest.raises(ConnectionError, match="closed by peer"):
        send(second, message(0, 1 << 20), 0)


def test_an_end_before_the_memory_has_come_raises() -> None:
    raw, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end = SharedMemoryPeer(connection, timeout=0.2)
    raw.send(peer._PACKET.pack(peer._MEMORY, 0, 0, 4096))
    raw.close()
    with pytest.raises(ConnectionError, match="closed by peer"):
        post(end, message(0, 4), 0).wait()
    end.close()


def test_no_descriptor_is_left_when_the_other_end_has_gone(pair: Pair) -> None:
    first, second = pair
    second.close()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConnectionError):
        first._grow(4096)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_receiver_that_may_open_no_more_files_says_so(pair: Pair) -> None:
    first, second = pair
    send(first, message(1, 8), 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            post(second, message(0, 8), 0).wait()
        with pytest.raises(OSError, match="Too many open files"):
            send(second, message(1, 8), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def flood(end: SharedMemoryPeer) -> None:
    for _ in range(10_000):
        send(end, message(7, 4), 0)


def test_a_send_waits_while_the_socket_is_full_and_reads_meanwhile(pair: Pair) -> None:
    first, second = pair
    send(second, message(3, 4), 0)
    received = post(first, message(0, 4), 0)
    with pytest.raises(TimeoutError, match="hundreds of messages are unread"):
        flood(first)
    assert received.came is not None
    data = message(0, 4)
    for _ in range(100):  # there is room again
        post(second, data, 0).wait()
    assert data.tolist() == [7] * 4
    send(first, message(7, 4), 0)


def test_shutdown_wakes_both_ends(pair: Pair) -> None:
    pair[0].shutdown()
    for end in pair:
        with pytest.raises(ConnectionError, match="closed by peer"):
            post(end, message(0, 4), 0).wait()


def exchange(transport: Transport) -> tuple[int, list[int]]:
    peer = 1 - transport.rank
    data = message(0, 3)
    work = transport.send(message(transport.rank + 1, 3), peer, Lane("forward"))
    transport.receive(data, peer, Lane("forward")).wait()
    work.wait()
    return len(transport._local), data.tolist()


def unreachable(process: int) -> Any:
    if process == 0:
        rendezvous._reach = lambda address, process: None  # as from another container
    return processes._with_transport(process, (exchange, Topology(2), 15.0, True, {}))


def no_memory(process: int) -> Any:
    if process == 1:
        del os.memfd_create
    return processes._with_transport(process, (exchange, Topology(2), 15.0, True, {}))


def test_processes_of_one_host_find_each_other() -> None:
    assert processes.run_pipeline(exchange, Topology(2)) == [(1, [2] * 3), (1, [1] * 3)]


def test_processes_that_cannot_reach_each_other_use_gloo() -> None:
    assert processes.run_world(unreachable, 2) == [(0, [2] * 3), (0, [1] * 3)]
    assert processes.run_world(no_memory, 2) == [(0, [2] * 3), (0, [1] * 3)]


def gather(transport: Transport) -> list[Any]:
    mine = [transport.process] * (3000 * transport.process)
    found = [[len(each) for each in transport.all_gather_object(mine, (0, 1, 2))]]
    if transport.process:
        found.append(transport.all_gather_object(transport.process, (1, 2)))
    return found


def half_reachable(process: int) -> Any:
    if process == 0:
        rendezvous._reach = lambda address, process: None  # 1 and 2 reach each other
    return processes._with_transport(process, (gather, Topology(3), 15.0, True, {}))


def test_processes_that_are_not_all_connected_gather() -> None:
    everything = [0, 3000, 6000]
    assert processes.run_world(half_reachable, 3) == [[everything], *[[everything, [1, 2]]] * 2]
