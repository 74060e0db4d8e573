"""Incomplete schedules and deadlocks are found, and the first offending action is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules import Action, GPipe, Kind, Schedule
from lightning_pipe.schedules.csv_format import parse_row
from lightning_pipe.schedules.family import schedule_of

GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def of(*rows: str) -> Schedule:
    return schedule_of("test", [parse_row(row.split()) for row in rows])


def test_a_complete_schedule_passes() -> None:
    of(*GOOD).validate()
    of("0F0 0F1 0R0 0B0 0B1", "1F0 1I0 1W0 1F1 1I1 1W1").validate()
    of("(0F0;0F1)JOINT_F 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 (1F2;1B1)OVERLAP_F_B 1B2").validate()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"), "never runs B or I of micro-batch 1 at stage 0"),
        (("0F0 0B0", "1F0 1B0 1F1 1B1"), "never runs F of micro-batch 1 at stage 0"),
        (("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1B1"), "never runs B or W of micro-batch 0 at stage 1"),
        (("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1"), r"row 1, action 0 \(1B0\): F of micro-batch 0 at stage 1 must come"),
        (("0F0 0F1 0B0 0B1", "1F0 1W0 1I0 1F1 1B1"), r"action 1 \(1W0\): B or I of micro-batch 0 at stage 1 must come"),
        (("0F0 0F1 0B0 0B1 0R1", "1F0 1B0 1F1 1B1"), "the backward of micro-batch 1 at stage 0 comes before it"),
        (("0F0 0F1 0F0 0B0 0B1", "1F0 1B0 1F1 1B1"), "the forward of micro-batch 0 at stage 0 is computed a second"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 1W1"), "the weight gradient of micro-batch 1 at stage 1 is computed a"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 0F0"), "is placed in row 1"),
        (("0F0 0F1@1 0B0 0B1@1", "1F0 1B0 1F1 1B1"), r"\(pipe, stage\) \(1, 1\) is missing"),
        (("0F0 0F1 0F2@1 0B0 0B1 0B2@1", "1F0 1B0 1F1 1B1 1F2 1B2 1F1@1"), "already takes pipe"),
        (("(0F0;0F1;0B0)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1"), r"action 2 \(0B0\): a forward pass can be one"),
        (("0F0 (0B0;0F1)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1"), r"action 2 \(0F1\): a forward pass can be one"),
        (("(0F0;1F0)JOINT_F 1B0 0B0",), "same stage and pipe alone"),
        (("0F0 0F1 0B0 0B1", "(1F0;1F1)JOINT_F 1B0 1B1"), "the last stage has a loss for each"),
        (("0F0 0F1 0B0 0B1", "1F0 (1F1;1I0)OVERLAP_F_B 1W0 1B1"), "whole backward pass right"),
        (("0F0 0F1 0B0 0B1", "(1F0;1B0)OVERLAP_F_B 1F1 1B1"), "it needs the forward pass that it is joined to"),
    ],
)
def test_the_first_offending_action_is_named(rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        of(*rows).validate()


def test_a_deadlock_names_who_waits_for_whom() -> None:
    with pytest.raises(ScheduleError, match="deadlocks") as caught:
        of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1").validate()
    assert "row 0 cannot run 0B0 (action 1): the gradient of micro-batch 0 at stage 1" in str(caught.value)
    assert "row 1 cannot run 1F1 (action 1): the forward of micro-batch 1 at stage 0" in str(caught.value)


def test_numbers_and_placement_are_checked() -> None:
    good = of(*GOOD)
    for broken, message in (
        (replace(good, placement={(0, 0): 0, (0, 1): 2}), "placed in row 2, but rows are 0 to 1"),
        (replace(good, placement={(0, 0): 0}), "is missing"),
        (replace(good, ranks=3), "2 rows of actions, but ranks=3"),
        (replace(good, micro_batches=1), "micro-batches are 0 to 0"),
        (replace(good, forward_only=True), "forward actions only"),
        (replace(good, actions=((Action(Kind.SEND_FORWARD, 0, 0, 0, 1),), ())), "inserted by lower"),
    ):
        with pytest.raises(ScheduleError, match=message):
            broken.validate()


@pytest.mark.parametrize(("ranks", "micro_batches", "stages"), [(0, 1, None), (1, 0, None), (4, 1, 3), (-1, 1, None)])
def test_impossible_numbers_are_refused(ranks: int, micro_batches: int, stages: int | None) -> None:
    with pytest.raises(ScheduleError, match="needs"):
        GPipe().build(ranks, micro_batches, stages)
