"""Actions and schedules as data."""

from __future__ import annotations

import pickle

import pytest

from lightning_pipe.schedules import Action, GPipe, Interleaved, Kind, OneFOneB, get, names, register, registry
from lightning_pipe.schedules.action import cells
from lightning_pipe.schedules.csv_format import parse_row


def test_a_schedule_knows_its_placement() -> None:
    schedule = Interleaved(virtual_stages=3).build(ranks=2, micro_batches=4)
    assert (schedule.pipes, schedule.stages, schedule.ranks) == (1, 6, 2)
    assert [schedule.stages_of(rank) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert schedule.placement[0, 3] == 1
    assert schedule.holders(4) == (0,)
    assert schedule.loss_ranks == (1,)


@pytest.mark.parametrize("stages", [3, 4, 7, 8, 12])
def test_further_stages_are_folded_onto_the_ranks_in_blocks(stages: int) -> None:
    schedule = OneFOneB().build(ranks=3, micro_batches=2, stages=stages)
    held = [schedule.stages_of(rank) for rank in range(3)]
    assert [stage for stages_ in held for stage in stages_] == list(range(stages))
    assert max(map(len, held)) - min(map(len, held)) <= 1


def test_one_rank_runs_all_stages() -> None:
    schedule = OneFOneB().build(ranks=1, micro_batches=2, stages=3)
    assert " ".join(map(str, schedule.actions[0])) == "0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1"


@pytest.mark.filterwarnings("ignore:.*has no order of its own")
def test_what_is_one_stays_so_folded_and_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_families", dict(registry._families))

    @register("joined")
    def joined(ranks: int, micro_batches: int) -> list[list[Action]]:
        rows = "(0F0;0F1)JOINT_F 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 (1F2;1B1)OVERLAP_F_B 1B2"
        return [parse_row(row.split()) for row in rows]

    whole = get("joined").build(ranks=2, micro_batches=3, stages=4)
    assert " ".join(cells(whole.actions[0])).startswith("(0F0;0F1)JOINT_F (1F0;1F1)JOINT_F 0F2 1F2 1B0 0B0")
    assert " ".join(cells(whole.actions[1])).endswith("3F1 (2F2;3B1)OVERLAP_F_B (3F2;2B1)OVERLAP_F_B 3B2 2B2")
    assert " ".join(cells(get(whole).build(2, 1, stages=4).actions[0])) == "0F0 1F0 1B0 0B0"
    assert " ".join(cells(get(whole).build(2, 2, stages=4).actions[1])) == "2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1"


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
