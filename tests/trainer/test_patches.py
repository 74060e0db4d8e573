"""After every run, also one that fails, torch, Lightning and torchmetrics are as they were before."""

from __future__ import annotations

import inspect
import signal
import sys
import types
import warnings
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CommunicationError
from lightning_pipe.patches import replacements
from tests.support.lit_modules import Data, Lit
from tests.support.pairs import asked, slow_but
from tests.support.processes import in_turn
from tests.support.trainer_runs import QUIET, quiet

LIBRARIES = ("torch", "lightning", "torchmetrics")


def functions_of_libraries() -> list[tuple[Any, str, Any]]:
    """The functions, methods and classes in all modules that are imported: where each is, its name, and itself."""
    found: list[tuple[Any, str, Any]] = []
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in LIBRARIES or not isinstance(module, types.ModuleType):
            continue
        for name, value in vars(module).items():
            if isinstance(value, (types.FunctionType, type)):
                found.append((module, name, value))
            if isinstance(value, type) and value.__module__ == module_name:
                methods = [each for each in vars(value).items() if isinstance(each[1], types.FunctionType)]
                found += [(value, *method) for method in methods]
    return found


def attributes_of(trainer: L.Trainer, module: L.LightningModule) -> dict[str, set[str]]:
    """The attributes of the objects that a run is made of which hold functions."""
    objects: dict[str, Any] = {
        "fit_loop": trainer.fit_loop,
        "epoch_loop": trainer.fit_loop.epoch_loop,
        "optimization": trainer.fit_loop.epoch_loop.automatic_optimization,
        "val_loop": trainer.fit_loop.epoch_loop.val_loop,
        "checkpoints": trainer._checkpoint_connector,
        "signals": trainer._signal_connector,
        "precision": trainer.precision_plugin,
        **{f"module {name}": part for name, part in module.named_modules()},
    }
    return {
        # after an error a module stays divided, and `_apply` belongs to its absent parameters
        name: {attribute for attribute, value in vars(each).items() if inspect.isroutine(value)} - {"_apply"}
        for name, each in objects.items()
    }


class Failing(Lit):
    """Fails in a step, or looks on while things are replaced."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.fails and batch_idx == 1:
            raise ValueError("mine")
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        assert len({name for _, name in replacements()} & {"log", "clip_grad_by_norm", "_sigterm_notifier_fn"}) >= 2


def trainer_of(**options: Any) -> L.Trainer:
    quiet()
    torch.manual_seed(0)
    strategy = PipeStrategy(layers="model", **({"micro_batches": 2} | options))
    return L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, num_sanity_val_steps=0, **QUIET)


def runs(process: int, fails: bool, **options: Any) -> list[str]:
    trainer, module = trainer_of(**options), Failing(fails).double()
    before, filters = functions_of_libraries(), list(warnings.filters)
    attributes, handlers = attributes_of(trainer, module), signal.getsignal(signal.SIGTERM)
    wrong: list[str] = []

    def check(run: str) -> None:
        wrong.extend(f"{run}: {name} of {owner}" for owner, name, value in before if vars(owner).get(name) is not value)
        now = attributes_of(trainer, module)
        wrong.extend(f"{run}: {name} {now[name] ^ attributes[name]}" for name in now if now[name] != attributes[name])
        wrong.extend(f"{run}: still replaced: {name} of {owner}" for owner, name in replacements())
        wrong.extend(f"{run}: filter {each}" for each in warnings.filters if each not in filters)
        if signal.getsignal(signal.SIGTERM) is not handlers:
            wrong.append(f"{run}: handler")

    if fails:
        with pytest.raises((ValueError, CommunicationError)):  # its own error, or that of the other process
            trainer.fit(module, datamodule=Data(16))
        check("failing fit")
        return wrong
    trainer.validate(module, datamodule=Data(), verbose=False)
    check("validate")
    for run in ("fit", "second fit"):
        trainer.fit_loop.max_epochs = (trainer.fit_loop.max_epochs or 0) + 1
        trainer.fit(module, datamodule=Data(16))
        check(run)
    return wrong


RUNS: dict[str, dict[str, Any]] = {
    "ends": {"fails": False},
    "fails": {"fails": True, "compare_losses": False},
    "asynchronous": {"fails": False, "schedule": "pipedream", "micro_batches": "auto"},
}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """What is wrong on each process."""
    return in_turn({name: partial(runs, **RUNS[name]) for name in asked(request, "name")}, 2)


@pytest.mark.parametrize("name", slow_but(RUNS, "ends", "fails"))
def test_nothing_stays_replaced(name: str, found: dict[str, list[Any]]) -> None:
    assert found[name] == [[], []]
