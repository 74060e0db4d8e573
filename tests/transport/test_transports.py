"""Every transport keeps the same promises: tests run over threads, over Gloo, and over shared memory of one host."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from lightning_pipe.errors import CommunicationError
from lightning_pipe.transport.base import Channel, Lane, Transport
from lightning_pipe.transport.topology import Topology
from tests.support import processes
from tests.support.pairs import slow_but
from tests.support.transports import EVERY, Run

FORWARD, BACKWARD = Lane("forward"), Lane("backward")


def message(number: int, size: int = 5) -> Tensor:
    return torch.full((size,), number % 251, dtype=torch.uint8)


def get(transport: Transport, size: int, peer: int, lane: Lane) -> list[int]:
    data = torch.zeros(size, dtype=torch.uint8)
    transport.receive(data, peer, lane).wait()
    return data.tolist()


def ring(transport: Transport) -> tuple[list[int], list[int]]:
    ranks = transport.topology.ranks
    after, before = (transport.rank + 1) % ranks, (transport.rank - 1) % ranks
    works = [transport.send(message(transport.process), after, FORWARD)]
    works += [transport.send(message(100 + transport.process), before, BACKWARD)]
    received = get(transport, 5, before, FORWARD), get(transport, 5, after, BACKWARD)
    for work in works:
        work.wait()
        work.wait()  # harmless
    return received


def test_messages_go_to_ranks_of_the_own_replica(run: Run) -> None:
    # Processes 0, 1 are ranks 1, 0 of replica 0; processes 2, 3 those of replica 1.
    results = run(ring, Topology(2, 2, loss_rank=-1))
    assert results == [([peer] * 5, [100 + peer] * 5) for peer in (1, 0, 3, 2)]


def stream(transport: Transport, sizes: list[int]) -> list[bool]:
    if transport.rank == 0:
        works = [transport.send(message(i, size), 1, FORWARD) for i, size in enumerate(sizes)]
        for work in works:
            work.wait()
        return []
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    works = [transport.receive(buffer, 0, FORWARD) for buffer in buffers]
    for work in reversed(works):  # waiting in another order changes nothing
        work.wait()
    return [bool((buffer == i % 251).all()) for i, buffer in enumerate(buffers)]


def test_a_lane_keeps_the_order_for_all_sizes(run: Run) -> None:
    sizes = [1, 1 << 20, 0, 3, 300_000, 7, 1 << 18]
    assert run(stream, Topology(2), sizes=sizes)[1] == [True] * len(sizes)


def out_of_order(transport: Transport) -> list[list[int]]:
    lanes = [Lane("forward", 0), Lane("backward", 0), Lane("forward", 1), Lane("backward", 1)]
    if transport.rank == 0:
        works = [transport.send(message(i, 1 << 19), 1, lane) for i, lane in enumerate(lanes)]
        received = [get(transport, 2, 1, lane) for lane in lanes]
        for work in works:
            work.wait()
        return received
    # Rank 0 sends four large messages first; this rank takes them last.
    works = [transport.send(message(10 + i, 2), 0, lane) for i, lane in reversed(list(enumerate(lanes)))]
    for work in works:
        work.wait()
    return [get(transport, 1 << 19, 0, lane)[:2] for lane in reversed(lanes)]


@pytest.mark.parametrize("run", EVERY, indirect=True)
def test_lanes_do_not_wait_for_each_other(run: Run) -> None:
    first, second = run(out_of_order, Topology(2))
    assert first == [[10, 10], [11, 11], [12, 12], [13, 13]]
    assert second == [[3, 3], [2, 2], [1, 1], [0, 0]]


def objects(transport: Transport) -> list[int]:
    """Objects of many sizes, in order and by tag; both ranks send before they receive."""
    sizes, peer = [0, 5000, 1 << 22, 3, 70_000], 1 - transport.rank
    works = [transport.send_object(torch.full((size,), size), peer, tag) for size in sizes for tag in (0, 1)]
    found = [transport.receive_object(peer, tag) for tag in (1, 0) for _ in sizes]
    for work in works:
        work.wait()
    assert all(bool((each == each.numel()).all()) for each in found)
    return [each.numel() for each in found]


def test_objects_meet_by_tag_and_keep_their_order(run: Run) -> None:
    assert run(objects, Topology(2)) == [[0, 5000, 1 << 22, 3, 70_000] * 2] * 2


def modes(transport: Transport) -> float:
    with torch.inference_mode():
        data = torch.zeros(4, dtype=torch.uint8)
    with torch.inference_mode(transport.rank == 0):
        if transport.rank == 0:
            transport.receive(data, 1, FORWARD).wait()
        else:
            transport.send(message(3, 4), 0, FORWARD).wait()
    version = torch.ones(2, requires_grad=True)
    transport.all_reduce(version, (0, 1)).wait()
    return float(version.detach().sum()) + float(data.sum())


def test_modes_of_autograd_do_not_matter(run: Run) -> None:
    assert run(modes, Topology(2)) == [16.0, 4.0]


def wait_in_vain(transport: Transport) -> str:
    start, text = time.monotonic(), ""
    try:
        if transport.rank == 1:
            get(transport, 40, 0, FORWARD)
        elif transport.rank == 2:
            transport.send(message(1, 30), 0, BACKWARD).wait()
    except CommunicationError as error:
        text = str(error)
    # Leave nobody before its own time is up: it would see the connections close.
    time.sleep(1.5 - time.monotonic() + start)
    return text


def in_vain(transport: Transport) -> str:
    result = wait_in_vain(transport)
    transport.barrier = lambda members=None: None  # type: ignore[method-assign]
    return result


@pytest.mark.parametrize("local", slow_but([False, True], True))
def test_waiting_in_vain_ends_at_the_timeout(local: bool) -> None:
    ended = processes.pipeline_outcomes(in_vain, Topology(3), group_timeout=1.0, local=local)
    texts = [outcome.value for outcome in ended if outcome.error is None]
    assert any(
        "Rank 1 could not receive 40 bytes from rank 0 on the forward lane of pipe 0 within 1 s" in t for t in texts
    )
    assert local or any("Rank 2 could not send 30 bytes to rank 0 on the backward lane of pipe 0" in t for t in texts)


def flood(transport: Transport, messages: int) -> bool:
    """Both ranks send many messages before either of them receives."""
    peer, mine = 1 - transport.rank, transport.rank
    works = [transport.send(message(mine + i, 9), peer, FORWARD) for i in range(messages)]
    transport.barrier()
    right = all(get(transport, 9, peer, FORWARD) == [(peer + i) % 251] * 9 for i in range(messages))
    for work in works:
        work.wait()
    return right


def test_many_messages_may_be_under_way(run: Run) -> None:
    assert run(flood, Topology(2), messages=200) == [True, True]


def closed_twice(transport: Transport) -> bool:
    transport.connect([Channel(0, 1, FORWARD)])
    transport.barrier()
    transport.close()
    transport.close()
    transport.barrier = lambda members=None: None  # type: ignore[method-assign]
    return True


def test_closing_twice_is_fine(run: Run) -> None:
    assert run(closed_twice, Topology(2)) == [True, True]
