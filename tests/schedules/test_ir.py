"""Actions and schedules as data."""

from __future__ import annotations

import pickle

import pytest

from lightning_pipe.schedules import Action, GPipe, Interleaved, Kind, OneFOneB, get, names


def test_a_schedule_knows_its_placement() -> None:
    schedule = Interleaved(virtual_stages=3).build(ranks=2, micro_batches=4)
    assert (schedule.pipes, schedule.stages, schedule.ranks) == (1, 6, 2)
    assert [schedule.stages_of(rank) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert schedule.rank_of(0, 3) == 1
    assert schedule.pipe_of(2) == 0
    assert schedule.holders(4) == (0,)
    assert (schedule.input_ranks, schedule.loss_ranks) == ((0,), (1,))


@pytest.mark.parametrize("stages", [3, 4, 7, 8, 12])
def test_further_stages_are_folded_onto_the_ranks_in_blocks(stages: int) -> None:
    schedule = OneFOneB().build(ranks=3, micro_batches=2, stages=stages)
    held = [schedule.stages_of(rank) for rank in range(3)]
    assert [stage for stages_ in held for stage in stages_] == list(range(stages))
    assert max(map(len, held)) - min(map(len, held)) <= 1


def test_one_rank_runs_all_stages() -> None:
    schedule = OneFOneB().build(ranks=1, micro_batches=2, stages=3)
    assert " ".join(map(str, schedule.actions[0])) == "0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1"


def test_virtual_stages_follow_from_the_stages_asked_for() -> None:
    assert Interleaved().build(ranks=2, micro_batches=2).stages == 4
    assert Interleaved().build(ranks=2, micro_batches=2, stages=6).stages_of(0) == (0, 2, 4)
    assert Interleaved(virtual_stages=2).build(ranks=2, micro_batches=2, stages=6).stages_of(0) == (0, 1, 4)


def test_actions_and_schedules_travel_to_other_processes() -> None:
    schedule = GPipe().build(ranks=2, micro_batches=2)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    for name in names():
        assert pickle.loads(pickle.dumps(get(name))) == get(name)


def test_an_action_is_printed_as_in_csv_files() -> None:
    assert str(Action(Kind.BACKWARD_WEIGHT, 3, 12)) == "3W12"
    assert str(Action(Kind.RECEIVE_BACKWARD, 1, 2, pipe=1, peer=0)) == "1RECV_B2@1<0"
    assert str(Action(Kind.REDUCE, 1, None)) == "1REDUCE"
