"""Sends, receives and reductions that are inserted: both ends agree on their order, and nothing deadlocks."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pipe import schedules
from lightning_pipe.schedules import Kind, OneFOneB, Schedule, lower
from lightning_pipe.schedules.action import COMPUTE, blocks
from lightning_pipe.schedules.family import schedule_of
from tests.support.random_orders import random_order
from tests.support.rendezvous_sends import RECEIVES, SENDS, assert_mirrored, run
from tests.support.schedule_sweep import SWEEPS, Sweep


def forwards(schedule: Schedule) -> Schedule:
    """The forward passes alone, as a file may have them."""
    orders = [[action for action in order if action.kind is Kind.FORWARD] for order in schedule.actions]
    return schedule_of(schedule.name, orders, placement=schedule.placement)


def pipes_of(schedule: Schedule) -> list[int]:
    """The pipe of every micro-batch."""
    return [each.pipe for order in schedule.actions for each in order if each.kind is Kind.FORWARD and not each.stage]


@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_both_ends_agree_on_messages_that_skip_stages(sweep: Sweep) -> None:
    for training in sweep:
        last = training.stages - 1
        skips = {(early, late) for early, late in ((0, last), (0, 2), (1, last)) if late - early > 1 and late <= last}
        for schedule in (training, forwards(training)):
            lowered = lower(schedule, skips)
            assert_mirrored(lowered)
            assert any(action.other is not None for actions in lowered for action in actions) == any(
                schedule.placement[pipe, early] != schedule.placement[pipe, late]
                for pipe in pipes_of(schedule)
                for early, late in skips
            )


@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_both_ends_agree_on_one_message_per_boundary_and_nothing_deadlocks(sweep: Sweep) -> None:
    for training in sweep:
        for schedule in (training, forwards(training)):
            lowered = lower(schedule)
            assert_mirrored(lowered)
            run(lowered, schedule.stages - 1)
            counts = Counter(action.kind for actions in lowered for action in actions)
            boundaries = sum(
                schedule.placement[pipe, stage] != schedule.placement[pipe, stage + 1]
                for pipe in pipes_of(schedule)
                for stage in range(schedule.stages - 1)
            )
            backward = not schedule.forward_only
            assert counts[Kind.SEND_FORWARD] == counts[Kind.RECEIVE_FORWARD] == boundaries
            assert counts[Kind.SEND_BACKWARD] == counts[Kind.RECEIVE_BACKWARD] == boundaries * backward
            copies = sum(len(schedule.holders(stage)) for stage in range(schedule.stages))
            assert counts[Kind.REDUCE] == (copies if training.synchronous else counts[Kind.STEP]) * backward
            for order, actions in zip(schedule.actions, lowered, strict=True):
                inserted = {*SENDS, *RECEIVES, Kind.REDUCE}
                assert tuple(action for action in actions if action.kind not in inserted) == order


@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_every_action_finds_its_value_received_and_its_result_sent_at_once(sweep: Sweep) -> None:
    for schedule in sweep:
        for actions in lower(schedule):
            place = {action[:4]: index for index, action in enumerate(actions)}
            for index, (kind, stage, micro_batch, pipe, *_) in enumerate(actions):
                if kind is Kind.RECEIVE_FORWARD:
                    assert index < place[Kind.FORWARD, stage, micro_batch, pipe]
                if kind is Kind.RECEIVE_BACKWARD:
                    gradient = place.get((Kind.BACKWARD, stage, micro_batch, pipe))
                    gradient = gradient or place[Kind.BACKWARD_INPUT, stage, micro_batch, pipe]
                    # The gradient's shape is that of the output, so the stage's forward comes first.
                    assert place[Kind.FORWARD, stage, micro_batch, pipe] < index < gradient
                if kind in SENDS:
                    what = (Kind.FORWARD,) if kind is Kind.SEND_FORWARD else (Kind.BACKWARD, Kind.BACKWARD_INPUT)
                    computed = [action for action in actions[:index] if action.kind in COMPUTE]
                    at_once = {action[:4] for action in blocks(computed)[-1]}
                    assert at_once & {(one, stage, micro_batch, pipe) for one in what}
                    assert actions[index - 1].kind in (*SENDS, computed[-1].kind)


@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_ranks_that_share_several_stages_reduce_them_in_the_same_order(sweep: Sweep) -> None:
    for schedule in filter(lambda schedule: schedule.synchronous, sweep):
        orders: dict[tuple[int, ...], set[tuple[int, ...]]] = defaultdict(set)
        for actions in lower(schedule):
            backwards = {Kind.BACKWARD, Kind.BACKWARD_WEIGHT}
            reduced = [action.stage for action in actions if action.kind is Kind.REDUCE]
            for holders in {schedule.holders(stage) for stage in reduced}:
                orders[holders].add(tuple(stage for stage in reduced if schedule.holders(stage) == holders))
            for index, action in enumerate(actions):
                if action.kind is Kind.REDUCE:
                    left = {later.stage for later in actions[index:] if later.kind in backwards}
                    assert action.stage not in left
        assert all(len(different) == 1 for different in orders.values())


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "naive"])
def test_receive_buffers_do_not_grow_with_the_micro_batches(name: str) -> None:
    for micro_batches in (4, 16, 64):
        schedule = schedules.get(name).build(ranks=4, micro_batches=micro_batches)
        assert run(lower(schedule), 3) <= 2
        assert run(lower(forwards(schedule)), 3) <= 2


@pytest.mark.parametrize("sweep", [Sweep(name) for name in ("naive", "gpipe", "1f1b")], ids=str)
def test_linear_schedules_survive_sends_that_block_their_rank(sweep: Sweep) -> None:
    for schedule in sweep:
        run(lower(schedule), schedule.stages - 1, blocking=True)


def test_1f1b_lowered() -> None:
    assert [" ".join(map(str, actions)) for actions in lower(OneFOneB().build(ranks=2, micro_batches=3))] == [
        "0F0 0SEND_F0>1 0RECV_B0<1 0F1 0SEND_F1>1 0B0 0RECV_B1<1 0F2 0SEND_F2>1 0RECV_B2<1 0B1 0B2 0REDUCE",
        "1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1RECV_F2<0 1B1 1SEND_B1>0 1F2 1B2 1SEND_B2>0 1REDUCE",
    ]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    ranks=st.integers(1, 5),
    stages=st.integers(1, 7),
    pipes=st.integers(1, 3),
    micro_batches=st.integers(1, 7),
)
def test_any_order_of_any_placement_is_lowered(
    data: st.DataObject, ranks: int, stages: int, pipes: int, micro_batches: int
) -> None:
    pipes = min(pipes, micro_batches)
    place = {(pipe, stage): data.draw(st.integers(0, ranks - 1)) for pipe in range(pipes) for stage in range(stages)}
    training = schedule_of("any", random_order(place, ranks, stages, micro_batches, data.draw(st.randoms())))
    for schedule in (training, forwards(training)):
        schedule.validate()
        lowered = lower(schedule)
        assert_mirrored(lowered)
        run(lowered, stages - 1)
