"""Hooks that walk over the parameters, buffers and gradients of all layers give what one device gives, or an error."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from tests.support import oracle
from tests.support.lit_modules import Data
from tests.support.pairs import asked, slow_but
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet
from tests.support.walks import (
    Averaged,
    Dictionary,
    KeepsBest,
    ListAverage,
    Lists,
    Swaps,
    Teacher,
    TeacherByData,
    Walks,
)


class Perturbed(Walks):
    """Adds noise to all weights, and limits them."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for weight in self.parameters():
                weight.add_(0.01 * torch.randn_like(weight)).clamp_(-0.5, 0.5)
                weight.data = weight.data - 0.01 * torch.randn(weight.shape, dtype=weight.dtype)


class NoisyGradients(Walks):
    """Adds noise to gradients, and to those that a layer has; limits them."""

    def on_after_backward(self) -> None:
        for weight in self.parameters():
            if weight.grad is not None:
                weight.grad += 0.1 * torch.randn_like(weight.grad)
                weight.grad.data.clamp_(-1.0, 1.0)
        self.model[0].weight.grad.add_(0.1 * torch.randn(8, 8, dtype=torch.float64))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = weight.grad + 0.01 * torch.rand(weight.grad.shape, dtype=weight.dtype)
        nn.utils.clip_grad_value_(self.parameters(), 0.5)
        torch._foreach_mul_([weight.grad for weight in self.parameters()], 0.9)

    def on_train_batch_end(self, *_: Any) -> None:
        assert all(weight.grad is not None for weight in self.parameters())
        self.zero_grad(set_to_none=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


CASES: dict[str, type[Walks]] = {
    kind.__name__: kind
    for kind in (
        *(Averaged, Teacher, TeacherByData, Dictionary, ListAverage),
        *(Lists, KeepsBest, Swaps, Perturbed, NoisyGradients),
    )
}


def fit(kind: type[Walks], devices: int | None, folder: Path, **strategy: Any) -> dict[str, Any]:
    """Train for two epochs; returns the checkpoint of the end, with the weights that the module has afterwards."""
    from lightning_pipe import PipeStrategy

    quiet()
    L.seed_everything(7, verbose=False)
    module = kind().double()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices or 1,
        strategy=PipeStrategy(**{"micro_batches": 1, "layers": "model", **strategy}) if devices else "auto",
        max_epochs=2,
        callbacks=[Saves(folder / f"{kind.__name__}-{devices}.ckpt")],
        **QUIET,
    )
    trainer.fit(module, Data(16).train_dataloader())
    checkpoint = torch.load(folder / f"{kind.__name__}-{devices}.ckpt", weights_only=False)
    return {"state": oracle.state_of(module), "saved": checkpoint["state_dict"], "averages": checkpoint.get("averages")}


class Saves(L.Callback):
    """Saves a checkpoint before the second epoch ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 1:
            trainer.save_checkpoint(self.path)


def fits(process: int, names: list[str], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = fit(CASES[name], 2, folder)
        except BaseException as error:
            found[name] = {"error": "".join(traceback.format_exception(error))}
            break
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("walks")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    return run_trainers(fits, 2, timeout=110, names=asked(request, "name"), folder=folder)


OTHERS = {"TeacherByData", "ListAverage"}
"""Averages that are written in other ways."""


@pytest.mark.parametrize("name", slow_but(CASES, *({*CASES} - OTHERS)))
def test_equals_one_device(name: str, found: list[dict[str, Any]], folder: Path) -> None:
    plain = fit(CASES[name], None, folder)
    for of_process in found:
        if name not in of_process:
            pytest.skip("an earlier case failed")
        assert "error" not in of_process[name], of_process[name]["error"]
        for key, expected in plain.items():
            if expected is not None:
                trace = oracle.Trace(weights=of_process[name][key])
                oracle.assert_equal(trace, oracle.Trace(weights=dict(expected)))
