"""Every transport keeps the same promises: tests run over threads, over Gloo, and over shared memory of one host."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CommunicationError
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.base import Channel, Lane, Transport
from lightning_pipe.transport.topology import Topology
from tests.support import processes
from tests.support.pairs import slow_but
from tests.support.transports import EVERY, Run, run_in_threads

FORWARD, BACKWARD = Lane("forward"), Lane("backward")


def message(number: int, size: int = 5) -> Tensor:
    return torch.full((size,), number % 251, dtype=torch.uint8)


def get(transport: Transport, size: int, peer: int, lane: Lane) -> list[int]:
    data = torch.zeros(size, dtype=torch.uint8)
    transport.receive(data, peer, lane).wait()
    return data.tolist()


def places(transport: Transport) -> tuple[int, int, int]:
    return transport.process, transport.replica, transport.rank


def test_every_process_knows_its_place(run: Run) -> None:
    assert run(places, Topology(2, 2, loss_rank=-1)) == [(0, 0, 1), (1, 0, 0), (2, 1, 1), (3, 1, 0)]


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


def objects(transport: Transport, size: int) -> list[Any]:
    peer = 1 - transport.rank
    works = [
        transport.send_object({"from": transport.rank, "tag": tag, "data": "x" * size}, peer, tag) for tag in range(3)
    ]
    works.append(transport.send_object("second with tag 0", peer, 0))
    received = [transport.receive_object(peer, tag) for tag in (2, 0, 1, 0)]
    for work in works:
        work.wait()
    return received


@pytest.mark.parametrize("size", slow_but([1, 100_000], 100_000))
def test_objects_meet_by_tag_and_both_may_send_first(run: Run, size: int) -> None:
    for rank, received in enumerate(run(objects, Topology(2), size=size)):
        expected: list[Any] = [{"from": 1 - rank, "tag": tag, "data": "x" * size} for tag in (2, 0, 1)]
        assert received == [*expected, "second with tag 0"]


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
    time.sleep(3 - time.monotonic() + start)
    return text


def in_vain(transport: Transport) -> str:
    result = wait_in_vain(transport)
    transport.barrier = lambda members=None: None  # type: ignore[method-assign]
    return result


@pytest.mark.parametrize("local", [False, True])
def test_waiting_in_vain_ends_at_the_timeout(local: bool) -> None:
    ended = processes.pipeline_outcomes(in_vain, Topology(3), group_timeout=2.0, local=local)
    texts = [outcome.value for outcome in ended if outcome.error is None]
    assert any(
        "Rank 1 could not receive 40 bytes from rank 0 on the forward lane of pipe 0 within 2 s" in t for t in texts
    )
    assert local or any("Rank 2 could not send 30 bytes to rank 0 on the backward lane of pipe 0" in t for t in texts)


def test_waiting_in_vain_ends_at_the_timeout_between_threads() -> None:
    with pytest.raises(CommunicationError, match=r"Rank 1 could not receive 40 bytes .* within 0.3 s"):
        run_in_threads(lambda transport: get(transport, 40, 0, FORWARD) if transport.rank else None, Topology(2), 0.3)


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


def engine(transport: Transport, schedule: str) -> list[float]:
    family = schedules.get(schedule)
    stages = 2 * family.stages_per_rank
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(stages)))
    for number, parameter in enumerate(module.parameters()):  # threads share one random generator
        nn.init.constant_(parameter, 0.1 + 0.1 * number)
    pipeline = Pipeline(module, find_layers(module), [1] * stages, family, transport)
    parts = [torch.full((2, 3), float(i)) for i in range(4)]
    sums = []
    for _ in range(3):
        pipeline.train(lambda _, part: module(part).square().mean(), parts, [0.25] * 4)
        sums.append(sum(float(p.grad.sum()) for _, p in pipeline.local_parameters() if p.grad is not None))
    pipeline.evaluate(lambda _, part: module(part).mean(), parts)
    return sums


@pytest.mark.parametrize("schedule", slow_but(["gpipe", "1f1b", "interleaved"], "interleaved"))
def test_the_engine_opens_all_channels_that_it_uses(schedule: str) -> None:
    expected = run_in_threads(engine, Topology(2), schedule=schedule)
    assert processes.run_pipeline(engine, Topology(2), local="closed channels", schedule=schedule) == expected
