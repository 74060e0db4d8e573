"""Asynchronous schedules over batches that come one per call: the papers' versions, and no waiting in the end."""

from __future__ import annotations

import pytest

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules import Action, Family, Kind, OneFOneB, PipeDream, PipeDream2BW
from lightning_pipe.schedules.asynchronous.calls import Call
from lightning_pipe.schedules.asynchronous.stream import Stream, stream
from tests.support.pairs import slow_but

FAST: list[tuple[Family, int, int | None]] = [
    (PipeDream(), 1, None),
    (PipeDream(), 4, None),
    (PipeDream(), 3, 5),
    (PipeDream(vertical_sync=True), 4, None),
    (PipeDream2BW(4), 2, None),
    (PipeDream2BW(6), 4, None),
    (PipeDream(replicas=(2, 1, 1)), 4, None),
    (PipeDream(replicas=(1, 3)), 4, None),
]
CASES: list[tuple[Family, int, int | None]] = [
    *((PipeDream(), ranks, None) for ranks in (1, 2, 3, 4, 8)),
    (PipeDream(), 3, 5),
    (PipeDream(), 1, 4),
    (PipeDream(vertical_sync=True), 4, None),
    *((PipeDream2BW(size), ranks, None) for ranks in (1, 2, 4) for size in (4, 6)),
    *((PipeDream(replicas=replicas), sum(replicas), None) for replicas in ((2, 1, 1), (1, 3), (2, 2), (3, 2, 1))),
]


def computed(call: Call, kind: Kind) -> list[int | None]:
    return [action.micro_batch for action in call.actions if action.kind is kind]


@pytest.mark.parametrize(("family", "ranks", "stages"), slow_but(CASES, *FAST), ids=str)
def test_every_action_once_on_a_version_that_exists(family: Family, ranks: int, stages: int | None) -> None:
    found = stream(family, ranks, stages)
    size, number = found.micro_batches, 40
    for rank in range(ranks):
        steps, oldest, seen = 0, 0, set()
        for index in range(number):
            call = found.call(rank, index)
            for action in call.actions:
                assert action not in seen
                seen.add(action)
                assert (action.micro_batch or 0) // size <= index <= (action.micro_batch or 0) // size + found.lag
                if action.kind in (Kind.FORWARD, Kind.BACKWARD):
                    assert oldest <= found.version(rank, action.micro_batch or 0) <= steps
            steps += bool(call.update)
            assert oldest <= call.oldest
            oldest = call.oldest
            assert steps - oldest + 1 <= found.weight_versions[rank]
        forwards = {a.micro_batch for a in seen if a.kind is Kind.FORWARD}
        backwards = {a.micro_batch for a in seen if a.kind is Kind.BACKWARD}
        mine = {i for i in forwards if (i or 0) < (number - found.lag - 1) * size}
        assert mine <= backwards
        updated = [batch for index in range(number) for batch in found.call(rank, index).update]
        assert updated == list(range(len(updated)))
        assert {(i or 0) // size for i in mine} <= set(updated)


# stages of equal cost are no balanced load for unequal replicas
@pytest.mark.parametrize(
    ("family", "ranks", "stages"), slow_but([case for case in CASES if case[0].pipes == 1], *FAST), ids=str
)
def test_no_rank_waits_in_the_steady_state(family: Family, ranks: int, stages: int | None) -> None:
    found = stream(family, ranks, stages)
    # with several stages on some ranks, the rank with most of them works all the time
    ends = simulated(found, ranks, number=60)
    work = max(
        sum({Kind.FORWARD: 1, Kind.BACKWARD: 2}.get(a.kind, 0) for a in found.call(rank, 40).actions)
        for rank in range(ranks)
    )
    loss_rank = ranks - 1
    assert ends[loss_rank][50] - ends[loss_rank][40] == 10 * work


def simulated(found: Stream, ranks: int, number: int) -> list[list[int]]:
    """When each rank ends each call, if the last rank begins a call by a message to all others."""
    done: dict[tuple[Kind, int, int | None], int] = {}
    ends = [[0] * number for _ in range(ranks)]
    for index in range(number):
        begin = [max(ends[r][index - 1], ends[ranks - 1][index - 1]) if index else 0 for r in range(ranks)]
        queues = [[a for a in found.call(r, index).actions if a.peer is None] for r in range(ranks)]
        time = list(begin)
        while any(queues):
            rank = next(r for r in range(ranks) if queues[r] and _inputs(queues[r][0], found, done) is not None)
            action = queues[rank].pop(0)
            arrived = _inputs(action, found, done)
            assert arrived is not None
            time[rank] = max(time[rank], arrived) + (1 if action.kind is Kind.FORWARD else 2)
            done[action.kind, action.stage, action.micro_batch] = time[rank]
        for rank in range(ranks):
            ends[rank][index] = time[rank]
    return ends


def _inputs(action: Action, found: Stream, done: dict[tuple[Kind, int, int | None], int]) -> int | None:
    """When an action's input is there; ``None``: not computed yet."""
    last = max(a.stage for calls in found.calls for call in calls for a in call.actions)
    stage = action.stage - 1 if action.kind is Kind.FORWARD else action.stage + 1
    if not 0 <= stage <= last:
        return 0
    return done.get((action.kind, stage, action.micro_batch))


def test_recomputation_follows_the_forward_into_later_calls() -> None:
    found = stream(PipeDream(), 3, recompute="always")
    call = found.call(0, 50)
    assert call.again == {(0, 50)}
    assert computed(call, Kind.RECOMPUTE) == computed(call, Kind.BACKWARD) == [48]


def test_what_cannot_go_on_over_batches_is_refused() -> None:
    with pytest.raises(ScheduleError, match="flushes the pipeline"):
        stream(OneFOneB(), 2)
    with pytest.raises(ScheduleError, match="more than stage 1 ever takes"):
        stream(PipeDream(vertical_sync=True, replicas=(1, 3)), 4)
