"""Writes down every hook of a module, its data and its callbacks: with what it is called, and the Trainer's state."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import Tensor

_STEPS = (
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "configure_optimizers",
    "configure_callbacks",
    "configure_gradient_clipping",
)
_REMOVED = ("configure_sharded_model",)
"""Deprecated hooks that raise if they are overridden."""
_LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader", "prepare_data")


class Call(NamedTuple):
    """One call of a hook.

    Args:
        owner: ``module``, ``data`` or ``callback``.
        name: of the hook.
        arguments: in a form that can be compared.
        state: of the Trainer.
        numbers: those in the arguments, in order; they are compared with a tolerance.
    """

    owner: str
    name: str
    arguments: str
    state: dict[str, Any]
    numbers: list[float]


def hooks_of(kind: type) -> list[str]:
    """The names of the hooks that users override."""
    if issubclass(kind, L.LightningModule):
        owners: tuple[type, ...] = (ModelHooks, DataHooks, CheckpointHooks)
        names = [name for owner in owners for name in vars(owner) if not name.startswith("_")]
        return [*(name for name in names if name not in (*_LOADERS, *_REMOVED)), *_STEPS]
    if issubclass(kind, L.LightningDataModule):
        return [*_LOADERS, "setup", "teardown", "on_before_batch_transfer", "transfer_batch_to_device"]
    return [name for name in vars(L.Callback) if not name.startswith("_") and callable(getattr(L.Callback, name))]


def recording(kind: type, calls: list[Call], owner: str) -> type:
    """A class that writes each of its hooks down, and otherwise does what ``kind`` does."""

    def recorded(name: str) -> Any:
        plain = getattr(kind, name)

        def hook(self: Any, *arguments: Any, **named: Any) -> Any:
            trainer = getattr(self, "trainer", None) or next((a for a in arguments if isinstance(a, L.Trainer)), None)
            values: list[float] = []
            bound = inspect.signature(plain).bind(self, *arguments, **named).arguments
            shown = {key: _shown(value, values) for key, value in bound.items() if key != "self"}
            calls.append(Call(owner, name, str(shown), {} if trainer is None else _state(trainer), values))
            return plain(self, *arguments, **named)

        hook.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]  # Lightning looks for names
        return hook

    names = [name for name in hooks_of(kind) if hasattr(kind, name)]
    return type(kind.__name__, (kind,), {name: recorded(name) for name in names})


def _state(trainer: L.Trainer) -> dict[str, Any]:
    loop = trainer.fit_loop
    return {
        "function": trainer.state.fn,
        "stage": trainer.state.stage,
        "status": str(trainer.state.status),
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        "batches": (loop.total_batch_idx, loop.batch_idx, trainer.is_last_batch),
        "stops": trainer.should_stop,
        "training": trainer.lightning_module is not None and trainer.lightning_module.training,
        "metrics": sorted(trainer.callback_metrics),
        "gradients": torch.is_grad_enabled(),
    }


def _shown(value: Any, values: list[float]) -> str:
    """A value in a form that is the same for equal values; its floating-point numbers go into ``values``."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            values.append(float(value.detach().double().sum()))
            return f"{value.dtype}{tuple(value.shape)}"
        return f"{value.dtype}{value.tolist()}"
    if isinstance(value, float):
        values.append(value)
        return "number"
    if isinstance(value, Mapping):
        known = "pytorch-lightning_version" in value  # a checkpoint: its values are compared elsewhere
        return str(sorted(value) if known else {key: _shown(each, values) for key, each in value.items()})
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[_shown(each, values) for each in value]}"
    return repr(value) if isinstance(value, bool | str | int | type(None)) else f"a {type(value).__name__}"
