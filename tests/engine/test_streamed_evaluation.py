"""Batches of an evaluation that follow each other give what one device gives, whatever the ranks hold."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.engine.streamed_evaluation import StreamedEvaluation
from lightning_pipe.errors import ScheduleError
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.single_process import SingleProcess
from tests.support.equality_sweep import Point, streamed
from tests.support.model_zoo import ZOO
from tests.support.pairs import pairs

BATCHES = 6
POINTS = [
    Point("gpipe", 3),
    Point("interleaved", 4, ranks=2),
    Point("interleaved", 3, ranks=1),
    Point(schedules.ZeroBubble(variant="v"), 4),
    Point("dualpipev", 4),
    Point("chimera", 4, ranks=4),
    Point("gems", 2, ranks=2),
    Point("bitpipe", 4),
]


@pytest.mark.parametrize(
    ("model", "point"),
    pairs(
        ["residual", "skips", "tied_to_layers", "odd_batches"], POINTS, lambda model, point: (model + point) % 8 == 0
    ),
)
def test_batches_equal_one_device(model: str, point: Point) -> None:
    entry = ZOO[model]
    with torch.no_grad():
        module = entry.build()
        truth = [float(module.loss(batch)) for batch in entry.batches(BATCHES)]
    found, _ = streamed(entry, point, BATCHES, torch.no_grad)
    assert found == pytest.approx(truth, rel=1e-9)


def forwards(ran: list[list[str]]) -> list[str]:
    """What each process runs; process 0 has the last stage."""
    return [" ".join(action for action in each if action[1] == "F") for each in ran]


def test_micro_batches_of_a_batch_follow_each_other() -> None:
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    pipeline = Pipeline(net, find_layers(net), [1, 1, 1], schedules.get("1f1b"), SingleProcess())
    ran = " ".join(map(str, pipeline.program(3, 1, training=False)))
    assert ran == "0F0 1F0 0F1 2F0 1F1 0F2 2F1 1F2 2F2"


def test_batches_overlap() -> None:
    entry = ZOO["residual"]
    _, ran = streamed(entry, Point("interleaved", 4, ranks=2), 4, torch.no_grad)
    assert forwards(ran) == ["1F0 1F1 3F0 1F2 3F1 1F3 3F2 3F3", "0F0 0F1 2F0 0F2 2F1 0F3 2F2 2F3"]
    _, ran = streamed(entry, Point("dualpipev", 4), 4, torch.no_grad)
    assert forwards(ran) == ["0F0 0F1 0F2 3F0 0F3 3F1 3F2 3F3", "1F0 2F0 1F1 2F1 1F2 2F2 1F3 2F3"]


@cache
def placements() -> dict[tuple[int, ...], str]:
    """The ranks of the stages of pipe 0, of every family on one to eight ranks; and some that no family has."""
    found: dict[tuple[int, ...], str] = {}
    for ranks in range(1, 9):
        for name in schedules.names():
            for family in schedules.get(name).variants():
                for stages in (family.stages_per_rank * ranks, 3 * ranks):
                    try:
                        schedule = family.unchecked(ranks, 2 * ranks, stages)
                    except ScheduleError:
                        continue
                    found[tuple(schedule.placement[0, stage] for stage in range(schedule.stages))] = name
    return found | dict.fromkeys([(0, 1, 1), (0, 0, 1), (1, 0, 0, 1, 1), (0, 1, 2, 1)], "uneven")


def order(ranks: tuple[int, ...], rank: int) -> StreamedEvaluation:
    """What a rank runs, of stages on some ranks."""
    executor = SimpleNamespace(
        placement={(0, stage): each for stage, each in enumerate(ranks)},
        later=[[stage + 1] for stage in range(len(ranks) - 1)] + [[]],
    )
    pipeline: Any = SimpleNamespace(transport=SimpleNamespace(rank=rank), executor=executor)
    return StreamedEvaluation(pipeline)


def ran(ranks: tuple[int, ...], batches: int) -> dict[tuple[int, int], int]:
    """By stage and batch, the slot of every pass that comes no later than the end of the last of some batches."""
    found: dict[tuple[int, int], int] = {}
    for rank in {*ranks}:
        stream = order(ranks, rank)
        for slot in range(stream.end_of(batches - 1) + 1):
            passes = [each for each in stream.up_to(slot) if each.kind == "F"]
            assert len(passes) <= 1
            for each in passes:
                assert (each.stage, each.micro_batch) not in found
                found[each.stage, each.micro_batch or 0] = slot
    return found


@pytest.mark.parametrize("batches", [20])
def test_every_pass_follows_the_pass_of_the_stage_before(batches: int) -> None:
    for ranks in placements():
        slots, first, stages = ran(ranks, batches), order(ranks, ranks[0]), len(ranks)
        starts = [slots[0, batch] for batch in range(batches)]
        for batch in range(batches):
            path = [slots[stage, batch] for stage in range(stages)]
            assert all(early < late for early, late in pairwise(path))
            assert path[-1] == first.end_of(batch)
            # no rank begins more before it knows what the end of the batch has brought
            if first.end_of(batch) + first.ahead <= first.end_of(batches - 1):
                assert sum(slot <= first.end_of(batch) + first.ahead for slot in starts) <= first.begun(batch)
            assert first.begun(batch) - batch <= stages + first.ahead


def test_the_busiest_rank_is_never_idle_but_at_the_beginning() -> None:
    for ranks in placements():
        most, stages = max(ranks.count(rank) for rank in ranks), len(ranks)
        slots = ran(ranks, 20)
        for rank in {rank for rank in ranks if ranks.count(rank) == most}:
            own = sorted(slot for (stage, _), slot in slots.items() if ranks[stage] == rank)
            full = range(most * (stages - 1), order(ranks, rank).end_of(19))
            assert {*full} <= {*own}


@pytest.mark.parametrize(("ranks", "ahead"), [((0, 1), 1), ((0, 1, 2, 3), 2), (tuple(range(8)), 4), ((0, 1, 1, 0), 1)])
def test_ranks_with_one_stage_may_run_some_slots_more(ranks: tuple[int, ...], ahead: int) -> None:
    assert order(ranks, 0).ahead == ahead


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0)])
def test_both_ends_of_a_pair_of_ranks_post_their_messages_in_one_order(ranks: tuple[int, ...]) -> None:
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
    received: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank in {*ranks}:
        stream = order(ranks, rank)
        for each in stream.up_to(stream.end_of(9)):
            batch, peer = each.micro_batch or 0, each.peer
            if each.kind == "SEND_F":
                sent.setdefault((rank, peer or 0), []).append((each.stage, batch))
            elif peer is not None:
                received.setdefault((peer, rank), []).append((each.stage - 1, batch))
    assert sent == received
