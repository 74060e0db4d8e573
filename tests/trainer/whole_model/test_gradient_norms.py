"""Norms of gradients in users' hooks are those of the whole model, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CommunicationError, ConfigurationError, PipeError
from lightning_pipe.partition import find_layers
from lightning_pipe.trainer.whole_model.gradient_norms import _total_norm
from lightning_pipe.transport.threads import ThreadTransport, run_threads, thread_world
from lightning_pipe.transport.topology import Topology
from tests.support import oracle
from tests.support.lit_modules import FEATURES, Data
from tests.support.processes import outcomes, run_trainers
from tests.support.trainer_runs import QUIET, quiet


class Norms(L.LightningModule):
    """Asks for norms wherever users do, and has a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, FEATURES)
        self.model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(4)))
        self.model[3].weight = self.embed.weight
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y = self.model(self.embed(batch[0].flatten(1)))
        assert torch.allclose(get_total_norm([y.detach()]), y.norm())  # in a step it is that of what is there
        return y.square().mean()

    def on_after_backward(self) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.note(get_total_norm(gradients, float("inf")), torch.nn.utils.get_total_norm(gradients, 3.0))
        self.note(get_total_norm(p.detach() for p in self.parameters()))
        self.note(get_total_norm([torch.ones(3)]))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, 2)
        self.note(*norms.values(), *grad_norm(self.model[:2], "inf").values())
        self.log_dict(norms)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.note(clip_grad_norm_(self.parameters(), 0.05))
        self.note(clip_grad_norm_(self.model[0].weight, 0.01))

    def note(self, *norms: Tensor) -> None:
        self.seen += [float(norm) for norm in norms]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(devices: int | None, **options: Any) -> tuple[list[float], oracle.Trace]:
    from lightning_pipe import PipeStrategy

    quiet()
    L.seed_everything(7, verbose=False)
    module, recorder = Norms().double(), oracle.Recorder()
    strategy = PipeStrategy(**{"micro_batches": 2, **options}) if devices else "auto"
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
    assert torch.nn.utils.clip_grad._get_total_norm is get_total_norm  # everything is as before
    return module.seen, trace


CASES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "chimera": {"schedule": "chimera"},
    "chimera_sharded": {"schedule": "chimera", "shard_optimizer": True},
    "chimera_scattered": {"schedule": "chimera", "shard_optimizer": "gradients"},
    "replicas": {"data_parallel_size": 2, "pipeline_parallel_size": 1},
    "replicas_scattered": {"data_parallel_size": 2, "pipeline_parallel_size": 1, "shard_optimizer": "gradients"},
}


def fit_all(process: int) -> dict[str, Any]:
    return {name: fit(2, **options) for name, options in CASES.items()}


class TooLate(Norms):
    """Asks when the gradients are divided."""

    def on_train_batch_end(self, *_: Any) -> None:
        clip_grad_norm_(self.parameters(), 1.0)


class Momenta(Norms):
    """Asks for a norm of what every rank has a part of."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        get_total_norm([torch.ones(1) * (1 + self.global_rank)])


def test_norms_are_those_of_one_device() -> None:
    seen, truth = fit(None)
    for process in run_trainers(fit_all, 2, timeout=60):
        for name, (found, trace) in process.items():
            assert found == pytest.approx(seen, rel=1e-7), name  # Lightning's total is a float32
            oracle.assert_equal(trace, truth)


class Asynchronous(Norms):
    """Asks for what has no meaning while batches are in flight."""

    def on_after_backward(self) -> None:
        pass


REFUSALS = {
    "on_before_optimizer_step": (TooLate, {"schedule": "chimera", "shard_optimizer": True}),
    "sees its own part": (Momenta, {}),
    "different batches": (Asynchronous, {"schedule": "pipedream", "micro_batches": 1}),
}


def refused(process: int, reason: str) -> None:
    from lightning_pipe import PipeStrategy

    quiet()
    module, options = REFUSALS[reason]
    strategy = PipeStrategy(**{"micro_batches": 2, **options})
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **QUIET)
    trainer.fit(module().double(), Data().train_dataloader())


@pytest.mark.parametrize("reason", REFUSALS)
def test_what_cannot_be_told_is_refused(reason: str) -> None:
    for outcome in outcomes(refused, 2, timeout=40, group_timeout=None, reason=reason):
        assert isinstance(outcome.error, ConfigurationError | CommunicationError)
        assert reason in str(outcome.error)


def asked_on_rank_0(other: Callable[[ThreadTransport], Any]) -> BaseException:
    """The error of the rank that asks for a norm while the other one does something else."""
    errors: list[BaseException] = []

    def body(transport: ThreadTransport) -> None:
        if transport.rank:
            other(transport)
            return
        module = Norms()
        pipeline = Pipeline(module, find_layers(module, "model"), [2, 2], schedules.get("1f1b"), transport)
        try:
            _total_norm(pipeline)(list(module.parameters()))
        except PipeError as error:
            errors.append(error)

    run_threads(thread_world(Topology.for_schedule(2), timeout=timedelta(seconds=0.5)), body, timeout=20)
    return errors[0]


def test_who_asks_alone_learns_what_and_where() -> None:
    alone = asked_on_rank_0(lambda transport: None)
    assert isinstance(alone, CommunicationError)
    for part in (
        "the norm of order 2 of gradients at ",
        __file__,
        "on all ranks, not under `if trainer.is_global_zero`",
    ):
        assert part in str(alone)
    mixed = asked_on_rank_0(lambda transport: transport.all_gather_object({"other": 1}, (0, 1)))
    assert isinstance(mixed, ConfigurationError)
    assert "other ranks ask for something else" in str(mixed)
