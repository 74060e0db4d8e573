"""Trains one published module for eight steps, and leaves losses, weights, warnings and the error in a folder.

``python -m tests.field.train NAME FOLDER '{"strategy": "pipe"}'`` is what a user's script does.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from tests.field.modules import MODULES
from tests.field.wrapping import STEPS, Slices

OURS = f"{os.sep}lightning_pipe{os.sep}"


class Losses(L.Callback):
    """The loss of every batch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.values.append(float(outputs["loss"]))


def fit(name: str, strategy: Any, devices: int, slices: int = 1, seed: int = 8) -> dict[str, Any]:
    """Train on one device, on one that accumulates slices of the batches, or on a pipeline."""
    make = MODULES[name].make()
    dtype = getattr(make, "dtype", torch.float64)
    torch.set_default_dtype(dtype)
    L.seed_everything(7, verbose=False)
    case = make()
    module = case.module.to(dtype)
    loader = torch.utils.data.DataLoader(Slices(case.loader, slices), batch_size=None) if slices > 1 else case.loader
    losses = Losses()
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, callbacks=[losses], max_epochs=1,
        limit_train_batches=STEPS * slices, accumulate_grad_batches=slices, limit_val_batches=int(case.validated),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    L.seed_everything(seed, verbose=False)
    trainer.fit(module, loader, case.loader if case.validated else None)
    summed = torch.tensor(losses.values).reshape(-1, slices).sum(1)  # those of slices are divided by their number
    return {
        "losses": summed.tolist(),
        "weights": {key: value for key, value in module.state_dict().items() if isinstance(value, torch.Tensor)},
        "parameters": [key for key, _ in module.named_parameters()],
        "norms": sum(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()),
        "optimizers": len(trainer.optimizers) if module.automatic_optimization else 0,
        "double": dtype == torch.float64,
    }


def described(error: BaseException) -> dict[str, Any]:
    """An error, with its remedy, and whether code of this package has asked torch for what failed."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    asking = [name for name in frames if f"{os.sep}torch{os.sep}" not in name and not name.endswith("tracker.py")]
    return {
        "type": type(error).__name__,
        "ours": any(kind.__module__.startswith("lightning_pipe") for kind in type(error).__mro__),
        "message": getattr(error, "message", None) or str(error),
        "hint": getattr(error, "hint", None) or "",
        "by_us": bool(asking) and OURS in asking[-1],
        "traceback": "".join(traceback.format_exception(error))[-6000:],
    }


@contextmanager
def noted() -> Iterator[list[str]]:
    """The warnings that code of this package gives."""
    found: list[str] = []

    def note(message: Warning | str, *_: Any) -> None:
        frame = sys._getframe(1)
        while frame.f_back and frame.f_code.co_filename.endswith(("warnings.py", "rank_zero.py")):
            frame = frame.f_back
        if OURS in frame.f_code.co_filename:
            found.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        yield found


def main(name: str, folder: str, options: str) -> None:
    """Run, and write what came out of it; each process writes for itself."""
    asked = json.loads(options)
    outcome: dict[str, Any] = {}
    with noted() as found:
        try:
            strategy = asked.get("strategy", "auto")
            if strategy != "auto":
                import lightning_pipe

                strategy = lightning_pipe.PipeStrategy(**asked["options"]) if asked["options"] else strategy
            outcome = fit(name, strategy, 2 if strategy != "auto" else 1, asked.get("slices", 1), asked.get("seed", 8))
        except BaseException as error:
            outcome = {"error": described(error)}
            raise
        finally:
            outcome["warnings"] = found
            torch.save(outcome, Path(folder) / f"{os.environ.get('LOCAL_RANK', '0')}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
