"""Clipping and norms of gradients are those of the whole model, or an error says how to ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from lightning_pipe.errors import PipeError
from tests.support import oracle
from tests.support.lit_modules import FEATURES, Data
from tests.support.processes import in_turn, refusals
from tests.support.trainer_runs import QUIET, impatient, quiet

PARTS: dict[str, Any] = {"micro_batches": 2, "compare_losses": False}


class Norms(L.LightningModule):
    """Asks for norms wherever users do, clips, and has a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, FEATURES)
        self.model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(4)))
        self.model[3].weight = self.embed.weight
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = self.model(self.embed(batch[0].flatten(1)))
        assert torch.allclose(get_total_norm([y.detach()]), y.norm())  # in a step it is that of what is there
        return y.square().mean()

    def norm(self, order: float = 2.0) -> Tensor:
        strategy: Any = self.trainer.strategy
        if hasattr(strategy, "grad_norm"):
            return strategy.grad_norm(order)
        return get_total_norm([p.grad for p in self.parameters() if p.grad is not None], order)

    def on_after_backward(self) -> None:
        self.seen += [float(self.norm(order)) for order in (2.0, 3.0, float("inf"))]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.norm())

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, 0.05, "norm")
        self.seen.append(float(self.norm()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(devices: int | None, **options: Any) -> tuple[list[float], oracle.Trace]:
    from lightning_pipe import PipeStrategy

    quiet()
    L.seed_everything(7, verbose=False)
    module, recorder = Norms().double(), oracle.Recorder()
    strategy = PipeStrategy(**{**PARTS, **options}) if devices else "auto"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices or 1,
        strategy=strategy,
        max_epochs=1,
        callbacks=[recorder],
        use_distributed_sampler=False,
        limit_train_batches=3,
        **QUIET,
    )
    trainer.fit(module, Data().train_dataloader())
    trace = recorder.trace
    trace.weights, trace.metrics = oracle.state_of(module), oracle.numbers(trainer.callback_metrics)
    return module.seen, trace


CASES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "chimera_sharded": {"schedule": "chimera", "shard_optimizer": True},
    "replicas_scattered": {"data_parallel_size": 2, "pipeline_parallel_size": 1, "shard_optimizer": "gradients"},
}
"""Gradients on their ranks, summed over copies of stages and divided over replicas."""


def test_norms_are_those_of_one_device() -> None:
    seen, truth = fit(None)
    for name, ranks in in_turn({name: partial(on_rank, name=name) for name in CASES}, 2).items():
        for found, trace in ranks:
            assert found == pytest.approx(seen, rel=1e-7), name
            oracle.assert_equal(trace, truth)


def on_rank(process: int, name: str) -> tuple[list[float], oracle.Trace]:
    return fit(2, **CASES[name])


class TooLate(Norms):
    """Asks when the gradients are divided."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.norm()


class InStep(Norms):
    """Asks where each rank runs another part of the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.norm()
        return loss


class OnOneRank(Norms):
    """Asks on one rank alone."""

    def on_after_backward(self) -> None:
        if self.trainer.is_global_zero:
            self.norm()


class TorchClips(Norms):
    """Clips by torch's function, which sees the gradients of this rank."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        clip_grad_norm_(self.parameters(), 0.05)


class TorchTells(Norms):
    """Logs what torch's function gives."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))


class LightningTells(Norms):
    """Logs what Lightning's function gives."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


class Scattered(TorchClips):
    """Clips by torch's function where the sums of gradients are divided over replicas."""


ASK = "trainer.strategy.grad_norm()"
REFUSALS: dict[type[Norms], tuple[str, dict[str, Any]]] = {
    TooLate: ("on_before_optimizer_step", {"schedule": "chimera", "shard_optimizer": True}),
    InStep: (ASK, {}),
    OnOneRank: ("rainer.strategy.grad_norm() is called on rank 0, and not on all others", {}),
    Norms: ("different batches", {"schedule": "pipedream", "micro_batches": 1}),
    TorchClips: (ASK, {}),
    TorchTells: (ASK, {}),
    LightningTells: (ASK, {}),
    Scattered: (ASK, {"data_parallel_size": 2, "pipeline_parallel_size": 1, "shard_optimizer": "gradients"}),
}


def refused(process: int, kind: type[Norms]) -> None:
    from lightning_pipe import PipeStrategy

    quiet()
    strategy = PipeStrategy(**{**PARTS, **REFUSALS[kind][1]})
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **QUIET)
    with impatient():
        trainer.fit(kind().double(), Data().train_dataloader())


FAST = (OnOneRank, Norms, TorchClips, LightningTells, Scattered)


@pytest.mark.parametrize(
    "kinds", [FAST, pytest.param([kind for kind in REFUSALS if kind not in FAST], marks=pytest.mark.slow)]
)
def test_what_cannot_be_told_is_refused(kinds: Sequence[type[Norms]]) -> None:
    for module, errors in refusals(refused, 2, kinds).items():
        for error in errors:
            assert isinstance(error, PipeError)
            assert REFUSALS[module][0] in str(error)
