"""Modules on the meta device under a Trainer: initialised by themselves, or by the checkpoint that follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CutError
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet
from tests.trainer.test_construction import Watch

WIDTH = 80


class Silent(nn.Module):
    """A layer that does not say how it is initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.01))
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.shift


class Lit(L.LightningModule):
    def __init__(self, silent: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.layers = nn.Sequential(*(Silent() if silent else nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(self.embed(batch))).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class BuiltLater(Lit):
    """Puts its layers on the meta device in ``setup``, after the module has been looked at."""

    def __init__(self, silent: bool) -> None:
        L.LightningModule.__init__(self)
        self.silent = silent

    def setup(self, stage: str) -> None:
        if not hasattr(self, "layers"):
            with torch.device("meta"):
                made = Lit(self.silent)
            self.embed, self.layers, self.head = made.embed, made.layers, made.head


def fit(devices: int, path: Path | None = None, save: Path | None = None, *, later: bool = False) -> dict[str, Tensor]:
    quiet()
    watch = Watch("on_train_start")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=PipeStrategy(micro_batches=2, layers="layers", compare_losses=False),
        max_epochs=1 if path is None else 2,
        callbacks=[watch],
        **QUIET,
    )
    L.seed_everything(5, verbose=False)
    torch.rand(devices)
    if later:
        module: L.LightningModule = BuiltLater(silent=path is not None)
    else:
        with trainer.init_module(empty_init=True):
            module = Lit(silent=path is not None)
        assert all(parameter.is_meta for parameter in module.parameters())
    data = DataLoader(torch.arange(16 * 8).remainder(100).view(16, 8), batch_size=8)
    trainer.fit(module, data, ckpt_path=path, weights_only=False if path else None)
    if save is not None:
        trainer.save_checkpoint(save)
    return watch.values


def fits(process: int, devices: int, path: Path) -> list[dict[str, Tensor]]:
    return [fit(devices), fit(devices, path), fit(devices, path, later=True)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of a module that is built plain."""
    quiet()
    torch.manual_seed(7)
    module = Lit(silent=True)
    for tensor in module.state_dict().values():
        tensor.copy_(torch.rand_like(tensor) * 0.1)
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, **QUIET)
    trainer.fit(module, DataLoader(torch.arange(16 * 8).remainder(100).view(16, 8), batch_size=8))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt"


def test_values_do_not_depend_on_the_number_of_processes(checkpoint: Path) -> None:
    saved = torch.load(checkpoint)["state_dict"]
    expected = [fit(1), saved, saved]
    found = run_trainers(fits, 2, devices=2, path=checkpoint)
    for case, known in enumerate(expected):
        seen: set[str] = set()
        for values in (process[case] for process in found):
            for name, value in values.items():
                assert torch.equal(value, known[name]), (case, name)
            seen |= set(values)
        assert seen == set(known)
        assert all(len(values) < len(seen) for values in (process[case] for process in found))


def test_what_no_checkpoint_and_nobody_else_gives_values() -> None:
    quiet()
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=PipeStrategy(layers="layers"), max_epochs=1, **QUIET)
    with trainer.init_module(empty_init=True):
        module = Lit(silent=True)
    with pytest.raises(CutError, match=r"nothing initialises 'layers\.0\.weight', 'layers\.0\.shift'"):
        trainer.fit(module, DataLoader(torch.zeros(8, 8, dtype=torch.int64), batch_size=8))
