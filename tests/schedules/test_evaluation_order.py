"""The order in which batches of an evaluation follow each other: right for every placement, packed, and bounded."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from lightning_pipe import schedules
from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.evaluation_order import EvaluationOrder, Pass

BATCHES = 40


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


def ran(order: EvaluationOrder, batches: int) -> tuple[dict[tuple[int, int], int], list[int], list[tuple[int, int]]]:
    """The slot of every pass, the ends of batches, and after each of them how many had begun by which slot."""
    slots: dict[tuple[int, int], int] = {}
    ends, begun = [], []
    for _ in range(batches):
        ends.append(order.to_end())
        while order.slots:
            number, passes = order.slots.popleft()
            assert len({each.rank for each in passes}) == len(passes)  # one pass on a rank
            for each in passes:
                assert (each.stage, each.batch) not in slots
                slots[each.stage, each.batch] = number
        begun.append((order.begun, number))
    return slots, ends, begun


def test_every_pass_follows_the_pass_of_the_stage_before() -> None:
    for ranks in placements():
        check_order(ranks)


def check_order(ranks: tuple[int, ...]) -> None:
    stages = len(ranks)
    order = EvaluationOrder(ranks)
    slots, ends, begun = ran(order, BATCHES)
    starts = [slot for (stage, _), slot in slots.items() if stage == 0]
    for batch in range(BATCHES):
        path = [slots[stage, batch] for stage in range(stages)]
        assert all(early < late for early, late in pairwise(path))
        assert path[-1] == ends[batch]
        # all ranks have computed as many slots when the loop comes to a batch
        known = ends[batch] + order.ahead
        assert begun[batch] == (sum(slot <= known for slot in starts), known)
        assert begun[batch][0] - batch <= stages + order.ahead
    for stage in range(stages):  # each stage runs the batches in their order
        of_stage = [slots[stage, batch] for batch in range(BATCHES)]
        assert all(early < late for early, late in pairwise(of_stage))
    for batch in range(stages, BATCHES):  # and as many as there are stages are in flight
        assert slots[0, batch] > ends[batch - stages]


def test_the_busiest_rank_is_never_idle_but_at_the_beginning() -> None:
    for ranks, name in placements().items():
        most = max(ranks.count(rank) for rank in ranks)
        _, ends, _ = ran(EvaluationOrder(ranks), BATCHES)
        assert ends[-1] + 1 <= most * BATCHES + len(ranks) - 1, (name, ranks)


def test_where_each_rank_has_one_stage_batches_follow_each_other_at_once() -> None:
    slots, ends, _ = ran(EvaluationOrder([0, 1, 2, 3]), 3)
    assert slots[0, 2] == 2
    assert ends == [3, 4, 5]


@pytest.mark.parametrize(("ranks", "ahead"), [([0, 1], 1), ([0, 1, 2, 3], 2), ([*range(8)], 4), ([0, 1, 1, 0], 1)])
def test_ranks_with_one_stage_may_run_some_slots_more(ranks: list[int], ahead: int) -> None:
    assert EvaluationOrder(ranks).ahead == ahead


def test_a_closed_order_ends_what_has_begun() -> None:
    order = EvaluationOrder([0, 1, 0, 1])
    order.to_end()
    order.close()
    assert order.begun == 3
    assert [order.to_end() for _ in range(2)] == [4, 7]
    passes = [each for _, slot in order.slots for each in slot]
    assert {each.batch for each in passes} == {0, 1, 2}
    assert Pass(rank=1, stage=3, batch=2) in passes
