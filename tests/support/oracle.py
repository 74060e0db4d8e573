"""What one plain device computes: the truth that every pipeline is compared with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.model_zoo import Entry
from tests.support.zoo.base import Module

TOLERANCE = 1e-9
SILENT: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments of a Trainer that does nothing but its loop."""


@dataclass
class Trace:
    """What a training run leaves behind.

    Args:
        losses: of every batch, in the order of the DataLoader; with replicas step by step, replica by replica.
        weights: the trained module's state.
        logged: ``trainer.logged_metrics`` after every batch.
        metrics: ``trainer.callback_metrics`` at the end.
    """

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    logged: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def samples(batch: Any) -> int:
    """Length of the batch: that of its first tensor."""
    return len(next(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)))


def split(batch: Any, micro_batches: int) -> list[Any]:
    """Cuts every tensor of the batch along dimension 0; never more micro-batches than samples."""
    count = min(micro_batches, samples(batch))
    parts = [torch.tensor_split(leaf, count) for leaf in tree_leaves(batch)]
    spread = [iter(part) for part in zip(*parts, strict=True)]
    return [tree_map(lambda _, own=own: next(own), batch) for own in spread]


def shares(parts: Sequence[Any]) -> list[float]:
    """The share of every part in the samples of all."""
    whole = sum(map(samples, parts))
    return [samples(part) / whole for part in parts]


def close(a: float | Tensor, b: float | Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether ``|a - b| <= tolerance (1 + |b|)`` everywhere; NaN is close to nothing."""
    left, right = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    return left.shape == right.shape and bool(((left - right).abs() <= tolerance * (1 + right.abs())).all())


def differences(found: Trace, expected: Trace, tolerance: float = TOLERANCE) -> list[str]:
    """Every loss, logged value and weight that differs, in words; empty if the runs are equal.

    What one of the two did not record (an empty list or mapping) is not compared.
    """
    wrong: list[str] = []
    if found.losses and expected.losses:
        wrong += _unequal(_numbered("loss", found.losses), _numbered("loss", expected.losses), tolerance)
    if found.weights and expected.weights:
        wrong += _unequal(found.weights, expected.weights, tolerance)
    if found.metrics and expected.metrics:
        wrong += _unequal(found.metrics, expected.metrics, tolerance)
    if found.logged and expected.logged:
        for step, (ours, theirs) in enumerate(zip(found.logged, expected.logged, strict=True)):
            wrong += [f"batch {step}: {line}" for line in _unequal(ours, theirs, tolerance)]
    return wrong


def assert_equal(found: Trace, expected: Trace, tolerance: float = TOLERANCE) -> None:
    """Fails with everything that differs."""
    wrong = differences(found, expected, tolerance)
    assert not wrong, "differs from one plain device:\n  " + "\n  ".join(wrong[:20])


def train(
    entry: Entry,
    steps: int = 3,
    micro_batches: int = 1,
    replicas: int = 1,
    accumulate: int = 1,
    clip: float | None = 0.5,
    before_micro_batch: Callable[[int, int], None] = lambda batch, micro_batch: None,
) -> Trace:
    """Trains without Lightning: the micro-batches one after the other, gradients weighted by samples and summed.

    Args:
        entry: the model and its batches.
        steps: optimizer steps.
        micro_batches: per batch.
        replicas: pipelines whose batches, taken in turn from the DataLoader, make one step together.
        accumulate: batches of each replica per optimizer step.
        clip: limit of the norm of all gradients together.
        before_micro_batch: called with the number of the batch and of the micro-batch; may seed generators.

    Returns:
        Losses and weights.
    """
    module = entry.build()
    optimizer = module.configure_optimizers()
    batches = iter(entry.batches(steps * replicas * accumulate))
    trace = Trace()
    index = 0
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            group = [next(batches) for _ in range(replicas)]
            for share, batch in zip(shares(group), group, strict=True):
                parts = split(batch, micro_batches)
                total = 0.0
                for number, (weight, part) in enumerate(zip(shares(parts), parts, strict=True)):
                    before_micro_batch(index, number)
                    loss = loss_of(module.training_step(part, index))
                    if loss.requires_grad:
                        (loss * (weight * share / accumulate)).backward()
                    total += weight * loss.item()
                trace.losses.append(total)
            index += 1
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    trace.weights = state_of(module)
    return trace


def train_with_lightning(
    entry: Entry,
    steps: int = 3,
    micro_batches: int = 1,
    accumulate: int = 1,
    clip: float | None = 0.5,
    validation: int = 0,
    **trainer_arguments: Any,
) -> Trace:
    """Trains with a plain Trainer on one CPU; its training step runs over the micro-batches.

    Every batch of the DataLoader is one batch of the pipeline. Logged values of micro-batches are merged as Lightning
    merges those of batches: mean weighted by samples.

    Args:
        entry: the model and its batches.
        steps: optimizer steps.
        micro_batches: per batch; 1 is the unmodified module.
        accumulate: ``accumulate_grad_batches``.
        clip: ``gradient_clip_val``.
        validation: batches to validate with, before and after training.
        trainer_arguments: what else the Trainer gets.

    Returns:
        Losses, weights, and what was logged.
    """
    module = entry.build()
    if micro_batches > 1:
        step_in_micro_batches(module, micro_batches)
    batches, more = entry.batches(steps * accumulate), entry.batches(validation)
    return fit(module, batches, accumulate=accumulate, clip=clip, validation=more, **trainer_arguments)


def fit(
    module: Module,
    batches: Sequence[Any],
    accumulate: int = 1,
    clip: float | None = 0.5,
    validation: Sequence[Any] = (),
    **arguments: Any,
) -> Trace:
    """One epoch over ready-made batches with a Trainer; used for the plain and for the pipelined one."""
    recorder = Recorder()
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "log_every_n_steps": 1, **SILENT, **arguments}
    callbacks = [recorder, *options.pop("callbacks", [])]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*")
        trainer = L.Trainer(accumulate_grad_batches=accumulate, gradient_clip_val=clip, callbacks=callbacks, **options)
        trainer.fit(module, loader(batches), loader(validation) if validation else None)
    trace = recorder.trace
    trace.weights = state_of(module)
    trace.metrics = numbers(trainer.callback_metrics)
    return trace


def loader(batches: Sequence[Any]) -> torch.utils.data.DataLoader[Any]:
    """A DataLoader that hands out ready-made batches."""
    return torch.utils.data.DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


class Recorder(L.Callback):
    """Records what callbacks can see after every batch."""

    def __init__(self) -> None:
        self.trace = Trace()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Lightning 2.6 hands over the loss divided by the number of accumulated batches
        self.trace.losses.append(loss_of(outputs).item() * trainer.accumulate_grad_batches)
        self.trace.logged.append(numbers(trainer.logged_metrics))


def step_in_micro_batches(module: Module, micro_batches: int) -> None:
    """Lets the module's training step go over the micro-batches and merge their losses and logs by samples."""
    step, log = module.training_step, module.log
    collected: dict[str, tuple[list[float], dict[str, Any]]] = {}

    def collect(name: str, value: Any, **options: Any) -> None:
        collected.setdefault(name, ([], options))[0].append(float(value))

    def in_micro_batches(batch: Any, batch_idx: int) -> Tensor:
        collected.clear()
        parts = split(batch, micro_batches)
        weights = shares(parts)
        module.log = collect  # type: ignore[method-assign]
        try:
            losses = [loss_of(step(part, batch_idx)) for part in parts]
        finally:
            module.log = log  # type: ignore[method-assign]
        for name, (values, options) in collected.items():
            merged = math.fsum(w * v for w, v in zip(weights, values, strict=True))
            log(name, torch.tensor(merged, dtype=torch.float64), **options)
        return torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum()

    module.training_step = in_micro_batches  # type: ignore[method-assign]


def loss_of(output: Any) -> Tensor:
    """The loss in what a training step returned."""
    return output["loss"] if isinstance(output, Mapping) else output


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the module's state."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as numbers."""
    return {name: float(value) for name, value in metrics.items()}


def _numbered(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name} {index}": value for index, value in enumerate(values)}


def _unequal(found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> Iterator[str]:
    for name in [*expected, *(name for name in found if name not in expected)]:
        if name not in found or name not in expected:
            yield f"{name}: only {'expected' if name in expected else 'found'}"
        elif not close(found[name], expected[name], tolerance):
            ours, theirs = (torch.as_tensor(x, dtype=torch.float64) for x in (found[name], expected[name]))
            if ours.shape != theirs.shape:
                yield f"{name}: shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
            else:
                error = (ours - theirs).abs()
                at = int(error.nan_to_num(nan=math.inf).argmax())
                yield (
                    f"{name}: {ours.flatten()[at].item()!r} instead of {theirs.flatten()[at].item()!r} "
                    f"(differs by {error.flatten()[at].item():.2e})"
                )
