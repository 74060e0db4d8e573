"""What a Trainer brings on a device: precision, overflow on one stage, compiled layers, random streams, checkpoints."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_pipe import PipeStrategy
from tests.benchmarks.measure import Finding
from tests.gpu.rows import compared
from tests.gpu.setting import Setting
from tests.support import oracle
from tests.support.trainer_runs import QUIET, quiet

WIDTH, SAMPLES, BATCHES, STAGES, MICRO_BATCHES = 32, 16, 4, 4, 2


class _Overflow(torch.autograd.Function):
    """Passes values on; the gradient that goes back is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spoilt: bool) -> Tensor:
        ctx.spoilt = spoilt
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * (float("inf") if ctx.spoilt else 1.0), None


class Block(nn.Module):
    """A residual layer with dropout, which may spoil the gradient of one batch."""

    def __init__(self, dropout: float, spoils: int | None = None) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.spoils, self.runs = spoils, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.spoils is None:
            return x + self.dropout(torch.tanh(self.linear(x)))
        self.runs += self.training
        spoilt = (self.runs - 1) // MICRO_BATCHES == self.spoils
        changed: Tensor = _Overflow.apply(x + torch.tanh(self.linear(x)), spoilt)
        return changed


class Model(L.LightningModule):
    """A regression; ``spoilt`` is the batch in which the second layer's gradient overflows."""

    def __init__(self, dropout: float = 0.0, spoilt: int | None = None) -> None:
        super().__init__()
        spoils = [None, spoilt, *[None] * (STAGES - 2)]
        self.layers = nn.ModuleList(Block(dropout, each) for each in spoils)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(setting: Setting) -> Iterator[Finding]:
    """A row for each subject."""
    quiet()
    beside, near = "2e-3 from the plain Trainer", "1e-4 from one run"
    yield compared("bf16-mixed", partial(_mixed, "bf16-mixed", None), beside)
    yield compared("16-mixed, one stage overflows once", partial(_mixed, "16-mixed", 1), beside)
    yield compared(
        "compiled layers", partial(_compiled, "eager" if setting.small else "inductor"), "1e-4 from plain ones"
    )
    yield compared(f"dropout on 1 and {STAGES} stages", _random_streams, "1e-6 from each other")
    for first, second in (("gpu", "cpu"), ("cpu", "gpu")):
        name = f"a checkpoint of {first} goes on on {second}"
        yield compared(name, partial(_checkpoint, first, second), near)


def _data() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [list(torch.randn(2, SAMPLES, WIDTH, generator=generator)) for _ in range(BATCHES)]


def _fit(model: L.LightningModule, **options: Any) -> tuple[oracle.Trace, L.Trainer]:
    """One epoch; ``stages`` is that of the strategy, without which it is a plain Trainer."""
    stages = options.pop("stages", None)
    if stages:
        options["strategy"] = PipeStrategy(stages=stages, micro_batches=MICRO_BATCHES, schedule="1f1b")
    else:
        oracle.step_in_micro_batches(model, MICRO_BATCHES)  # type: ignore[arg-type]
    recorder, checkpoint = oracle.Recorder(), options.pop("ckpt_path", None)
    arguments = {"accelerator": "gpu", "devices": 1, "max_epochs": 1, **QUIET, **options}
    trainer = L.Trainer(**arguments, callbacks=[recorder])
    with contextlib.redirect_stdout(io.StringIO()):  # the plan
        trainer.fit(model, oracle.loader(_data()), ckpt_path=checkpoint)
    recorder.trace.weights = {name: value.cpu() for name, value in oracle.state_of(model).items()}
    return recorder.trace, trainer


def _mixed(precision: str, spoilt: int | None) -> list[str]:
    """Losses, weights and the scaler's factor beside those of the plain Trainer on the same slices."""

    def plugin() -> MixedPrecision:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10) if precision == "16-mixed" else None
        return MixedPrecision(precision, "cuda", scaler)  # type: ignore[arg-type]

    torch.manual_seed(0)
    model = Model(spoilt=spoilt)
    (expected, plain), (found, ours) = (
        _fit(copy.deepcopy(model), plugins=[plugin()], stages=stages) for stages in (None, STAGES)
    )
    differences = oracle.differences(_bare(found), _bare(expected), tolerance=2e-3)
    factors = [getattr(trainer.precision_plugin, "scaler", None) for trainer in (plain, ours)]
    scales = [factor.get_scale() for factor in factors if factor is not None]
    if len(set(scales)) > 1:
        differences.append(f"factors {scales}")
    if spoilt is not None and scales and scales[0] >= 2.0**10:
        differences.append("nothing overflowed")
    return differences


def _bare(trace: oracle.Trace) -> oracle.Trace:
    return oracle.Trace(trace.losses, trace.weights)


def _compiled(backend: str) -> list[str]:
    """Layers that torch compiles, beside the same ones as they are."""
    torch.manual_seed(0)
    model = Model()
    compiled = copy.deepcopy(model)
    for layer in compiled.layers:
        layer.compile(backend=backend)
    expected, _ = _fit(model)
    found, _ = _fit(compiled, stages=STAGES)
    return oracle.differences(_bare(found), _bare(expected), 1e-4)


def _random_streams() -> list[str]:
    """Dropout does not depend on the stages."""
    torch.manual_seed(0)
    model = Model(dropout=0.5)
    traces = []
    for stages in (1, STAGES):
        L.seed_everything(5, verbose=False)
        traces.append(_fit(copy.deepcopy(model), stages=stages)[0])
    differences = oracle.differences(_bare(traces[1]), _bare(traces[0]), 1e-6)
    torch.manual_seed(0)
    without, _ = _fit(Model(), stages=STAGES)
    if abs(without.losses[0] - traces[0].losses[0]) < 1e-6:
        differences.append("nothing was dropped")
    return differences


def _checkpoint(first: str, second: str) -> list[str]:
    """A checkpoint of one device goes on on the other; beside it one plain run."""
    torch.manual_seed(0)
    model = Model()
    whole, _ = _fit(copy.deepcopy(model), accelerator="cpu", max_epochs=2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.ckpt")
        _, trainer = _fit(copy.deepcopy(model), accelerator=first, stages=STAGES)
        trainer.save_checkpoint(path)
        found, _ = _fit(copy.deepcopy(model), accelerator=second, stages=STAGES, max_epochs=2, ckpt_path=path)
    return oracle.differences(_bare(found), oracle.Trace(whole.losses[BATCHES:], whole.weights), 1e-4)
