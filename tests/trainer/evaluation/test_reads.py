"""Which attributes a step reads, and whether they have changed since."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from lightning_pipe.trainer.evaluation.reads import AttributeReads


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.threshold, self.unread = [0.5], 1
        self.register_buffer("mean", torch.zeros(1))

    @property
    def limit(self) -> float:
        return self.threshold[0] * 2

    def step(self) -> Any:
        return self.layer(self.mean) + self.limit + self.current_epoch


def test_data_is_noted_and_nothing_else() -> None:
    module = Module()
    reads = AttributeReads({"": module})
    with reads.installed():
        with reads.noting() as names:
            module.step()
        _ = module.unread  # outside of a run
    assert names == {"": {"threshold", "mean"}}
    assert "__getattribute__" not in vars(Module)


def test_changes_of_what_was_read_are_told() -> None:
    module = Module()
    reads = AttributeReads({"": module})
    state = reads.state({"": {"threshold", "mean"}})
    assert state is not None
    module.unread = 2
    assert state.changed() == []
    module.threshold[0] = 0.7
    module.mean.add_(1)
    assert sorted(state.changed()) == ["self.mean", "self.threshold"]
    assert reads.state({}) is None
