"""Costs that were measured with other input than the run's are still used, and the plan says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn

from lightning_pipe import CostProfile, PipeStrategy, profile
from lightning_pipe.engine.containers import signature
from lightning_pipe.planning.cost_profile import default_path
from lightning_pipe.profiling.measure import SHAPES
from lightning_pipe.trainer.data.micro_batches import MicroBatches
from lightning_pipe.trainer.measured_shapes import MeasuredShapes
from tests.support import oracle
from tests.support.trainer_runs import QUIET


class Net(L.LightningModule):
    """Takes sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def told(folder: Path, length: int, capsys: pytest.CaptureFixture[str], **options: str) -> str:
    """What a run on sequences of a length prints."""
    strategy = PipeStrategy(micro_batches=2, layers="layers", **options)  # type: ignore[arg-type]
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **QUIET)
    trainer.fit(Net(), oracle.loader([torch.ones(4, length, 8)]))
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_PIPE_CACHE", str(tmp_path))
    return tmp_path


def test_what_a_profile_was_measured_with_is_stored_and_compared(cache: Path) -> None:
    found = profile(Net(), torch.ones(4, 5, 8), micro_batch_sizes=[1], rounds=1, layers="layers")
    assert found.conditions[SHAPES] == "(1, 5, 8) float32"
    path = default_path("Net", [layer.name for layer in found.layers], [layer.parameters for layer in found.layers])
    replace(found).save(path)
    shapes = MeasuredShapes(CostProfile.load(path).conditions[SHAPES])
    assert shapes.notes(MicroBatches([torch.ones(2, 5, 8)], [2], [1.0])) == ()
    (note,) = shapes.notes(MicroBatches([torch.ones(2, 7, 8)], [2], [1.0]))
    assert "by a profile of samples (1, 5, 8) float32; those of this batch are (1, 7, 8) float32" in note
    assert MeasuredShapes().notes(MicroBatches([torch.ones(2, 7, 8)], [2], [1.0])) == ()


def test_a_balance_by_costs_of_other_shapes_is_told(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = [told(cache, length, capsys, balance="time") for length in (5, 5, 7, 7)]
    assert ["of other shapes" in output for output in outputs] == [False, False, True, False]
    part = torch.ones(2, 5, 8)
    known = MeasuredShapes(balance=str(signature(part)))
    assert known.notes(MicroBatches([part], [2], [1.0])) == ()
