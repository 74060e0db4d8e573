"""The order of evaluation on the placement of a training schedule."""

from __future__ import annotations

import pytest

from lightning_pipe.schedules import Interleaved, Kind, OneFOneB, forward_only
from tests.support.schedule_sweep import SWEEPS, Sweep


@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_evaluation_runs_every_micro_batch_forward_on_the_same_placement(sweep: Sweep) -> None:
    for training in sweep:
        for micro_batches in (1, 4):
            evaluation = forward_only(training, micro_batches)
            assert evaluation.forward_only
            assert evaluation.placement == training.placement
            assert {action.kind for actions in evaluation.actions for action in actions} == {Kind.FORWARD}


def test_micro_batches_leave_the_pipeline_as_early_as_they_can() -> None:
    evaluation = forward_only(Interleaved(virtual_stages=2).build(ranks=2, micro_batches=2), micro_batches=3)
    assert [" ".join(map(str, actions)) for actions in evaluation.actions] == [
        "0F0 0F1 2F0 2F1 0F2 2F2",
        "1F0 1F1 3F0 3F1 1F2 3F2",
    ]


def test_several_stages_on_one_rank() -> None:
    evaluation = forward_only(OneFOneB().build(ranks=1, micro_batches=2, stages=3), micro_batches=2)
    assert " ".join(map(str, evaluation.actions[0])) == "0F0 1F0 2F0 0F1 1F1 2F1"
