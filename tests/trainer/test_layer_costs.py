"""Costs that a run goes by: those of `lightning-pipe profile` or of an earlier run; of other input with a word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_pipe import CostProfile, PipeStrategy, profile
from lightning_pipe.batches.micro_batches import MicroBatches
from lightning_pipe.cli import main
from lightning_pipe.partition import find_layers
from lightning_pipe.planning.cost_profile import SHAPES
from lightning_pipe.planning.profile_store import ProfileStore
from lightning_pipe.trainer.layer_costs import shapes_of
from lightning_pipe.trainer.schedule_choice import choose
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


def told(
    folder: Path, length: int, capsys: pytest.CaptureFixture[str], precision: Any = "32-true", **options: str
) -> str:
    """What a run on sequences of a length prints."""
    strategy = PipeStrategy(micro_batches=2, layers="layers", **options)  # type: ignore[arg-type]
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, precision=precision, **QUIET)
    trainer.fit(Net(), oracle.loader([torch.ones(4, length, 8)]))
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_PIPE_CACHE", str(tmp_path))
    return tmp_path


def test_what_a_profile_was_measured_with_is_stored(cache: Path) -> None:
    found = profile(Net(), torch.ones(4, 5, 8), micro_batch_sizes=[1], rounds=1, layers="layers")
    assert found.conditions[SHAPES] == "(1, 5, 8) float32"
    path = ProfileStore(Net(), find_layers(Net(), "layers"), {}, cache).path
    found.save(path)
    assert CostProfile.load(path).conditions[SHAPES] == found.conditions[SHAPES]


def test_samples_of_other_shapes_are_measured_anew(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = [told(cache, length, capsys, balance="time") for length in (5, 5, 7, 7)]
    assert ["Measured the layers" in output for output in outputs] == [True, False, True, False]
    # a batch of an object that is no tensor has words, too
    assert shapes_of(MicroBatches([3], [1], [1.0])) != "(1, 5, 8) float32"


def test_a_run_is_balanced_by_what_the_command_has_measured(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of `lightning-pipe profile` is read by a run, which measures nothing, and by `schedule="auto"`."""
    here = "tests.trainer.test_layer_costs"
    main(
        ["profile", f"{here}:Net", "--batch", f"{here}:batch", "--layers", "layers", "--sizes", "[1]", "--rounds", "1"]
    )
    (path,) = cache.iterdir()
    assert str(path) in capsys.readouterr().out
    written = path.read_text()
    output = told(cache, 5, capsys, balance="time")
    assert "balanced by time: the largest stage costs" in output
    assert "Measured the layers" not in output
    assert (path.read_text(), [*cache.iterdir()]) == (written, [path])
    assert "ranks 1 in the profile, 2 now" in choose(Net(), "layers", 2, 2, torch.device("cpu")).reason
    found = CostProfile.load(path)
    replace(found, conditions={**found.conditions, "ranks": "2"}).save(path)
    assert choose(Net(), "layers", 2, 2, torch.device("cpu")).reason.endswith(f"By {path}")
    # another precision is measured anew, and the plan says why
    output = told(cache, 5, capsys, balance="time", precision="bf16-mixed")
    assert "precision 32-true in the profile, bf16-mixed now" in " ".join(output.split())
    assert "Measured the layers" in output
    assert CostProfile.load(path).conditions["source"] == "the first batch of a run"


def test_a_folder_that_cannot_be_written_does_not_end_the_training(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("LIGHTNING_PIPE_CACHE", str(cache / "file" / "folder"))
    with pytest.warns(UserWarning, match="The costs of the layers cannot be stored"):
        output = told(cache, 5, capsys, balance="time")
    assert "Measured the layers" not in output
    assert "Pipeline of Net" in output


def test_a_file_that_cannot_be_read_is_measured_anew(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ProfileStore(Net(), find_layers(Net(), "layers"), {}, cache).path
    path.write_text("{")
    output = " ".join(told(cache, 5, capsys, balance="time").split())
    assert "is no profile that can be read" in output
    assert "Measured the layers" in output
    assert CostProfile.load(path).conditions[SHAPES] == "(1, 5, 8) float32"


def batch() -> torch.Tensor:
    return torch.ones(4, 5, 8)
