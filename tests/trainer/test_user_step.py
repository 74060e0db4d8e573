"""What ranks learn of a step from the ranks with the last stage."""

from __future__ import annotations

import torch

from lightning_pipe.trainer.user_step import StepReport, known_outputs, losses_of


def test_outputs_of_several_ranks_come_together() -> None:
    one, other = StepReport({0: "a", 2: "c"}, [], [], []), StepReport({1: "b"}, [], [], [])
    assert known_outputs([one, other, StepReport(None, [], [], [])]) == {0: "a", 1: "b", 2: "c"}


def test_what_is_no_number_is_no_loss() -> None:
    outputs = {
        0: {"loss": torch.ones(())},
        1: torch.zeros(()),
        2: {"n": 1},
        3: {"loss": None},
        4: torch.ones(2),
        5: "text",
    }
    assert losses_of(outputs) == {0: 1.0, 1: 0.0}
