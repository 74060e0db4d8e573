"""Batch norm over micro-batches: normalise by the micro-batch, keep the statistics of the whole mini-batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.recompute import is_recomputing
from lightning_pipe.torch_internals import BatchNorm, in_backward
from lightning_pipe.transport.base import Transport

Module = TypeVar("Module", bound=nn.Module)
Call = tuple[int, int]
"""One of the calls of a norm in a forward pass: the stage that makes it, and its number there."""

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_run = threading.local()


@dataclass(frozen=True)
class Moments:
    """Number of values per channel, their mean, and the sum of their squared deviations from it."""

    values: int
    mean: Tensor
    deviation: Tensor

    def merge(self, other: Moments) -> Moments:
        """The moments of both sets of values (Chan, Golub and LeVeque, 1979)."""
        values = self.values + other.values
        if not self.values or not other.values:
            return self if self.values else other
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.values / values)
        deviation = self.deviation + other.deviation + delta.square() * (self.values * other.values / values)
        return Moments(values, mean, deviation)


class DeferredBatchNorm(BatchNorm):
    """Batch norm whose running statistics are those of whole mini-batches.

    In training every micro-batch is normalised by its own statistics; the running mean and the (unbiased) running
    variance, as `torch.nn.BatchNorm2d` keeps them, are updated once per mini-batch, by `commit`, from all its
    micro-batches together. A norm that a forward pass calls several times is updated once for each of these calls, in
    their order. What runs again for a backward pass (`torch.utils.checkpoint`) counts once. Evaluation, parameters,
    buffers and keys are those of the norm that was converted. The pipeline converts modules and commits by itself.
    Source: GPipe, arXiv:1811.06965v5, section 2.3.

    Shapes are those of the norm that was converted: input and output (N, C) or (N, C, …), statistics (C,).

    Example:
        >>> norm = DeferredBatchNorm.convert(nn.BatchNorm1d(3))
        >>> batch = torch.randn(10, 3)
        >>> _ = [norm(part) for part in batch.tensor_split(3)]
        >>> norm.commit()
        >>> torch.allclose(norm.running_mean, 0.1 * batch.mean(0), atol=1e-6)
        True
        >>> torch.allclose(norm.running_var, 0.9 + 0.1 * batch.var(0), atol=1e-6)
        True
    """

    plain: type[BatchNorm]
    pending: dict[Call, Moments]

    @staticmethod
    def convert(module: Module) -> Module:
        """Turn every batch norm in ``module``, subclasses included, into its deferred form, in place.

        Args:
            module: any module; modules without batch norm stay as they are.

        Returns:
            The same module.
        """
        for part in module.modules():
            if isinstance(part, BatchNorm) and not isinstance(part, DeferredBatchNorm):
                part.__class__ = _deferred(type(part))  # type: ignore[arg-type]
                part.pending = {}  # type: ignore[assignment]
        return module

    @staticmethod
    def revert(module: Module) -> Module:
        """Undo `convert`, in place; statistics that were not committed are lost.

        Args:
            module: any module.

        Returns:
            The same module.
        """
        for part in module.modules():
            if isinstance(part, DeferredBatchNorm):
                part.__class__ = part.plain  # type: ignore[assignment]
                del part.pending
        return module

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Normalise; in training, note the statistics for `commit`."""
        if not self.training or not self.track_running_stats:
            return super().forward(input, *args, **kwargs)
        own = type(self).plain.forward is not BatchNorm.forward
        if input.numel() // max(1, input.shape[1]) < 2 and not own:
            raise ConfigurationError(
                f"Batch norm needs more than one value per channel; this micro-batch has shape {tuple(input.shape)}.",
                hint="Use fewer micro-batches, so that each has at least two samples, and DataLoader(drop_last=True) "
                "if the last batch has a single one.",
            )
        if not is_recomputing() and not in_backward():
            self._note(input.detach())
        if own:
            with self._untouched():
                return super().forward(input, *args, **kwargs)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        return nn.functional.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)

    @torch.no_grad()
    def _note(self, values: Tensor) -> None:
        others = [axis for axis in range(values.dim()) if axis != 1]
        exact = values.dtype if values.dtype == torch.float64 else torch.float32
        variance, mean = torch.var_mean(values.to(exact), others, correction=0)
        count = values.numel() // values.shape[1]
        moments, call = Moments(count, mean, variance * count), self._call()
        before = self.pending.get(call)
        self.pending[call] = moments if before is None else before.merge(moments)

    def _call(self) -> Call:
        """Which of the forward pass's calls of this norm is under way."""
        stage: int = getattr(_run, "stage", 0)
        calls: dict[int, int] | None = getattr(_run, "calls", None)
        if calls is None:
            return stage, 0
        number = calls[id(self)] = calls.get(id(self), -1) + 1
        return stage, number

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Let a forward method that is not torch's update copies of the running statistics."""
        before = {name: self._buffers[name] for name in _BUFFERS}
        self._buffers.update({name: None if value is None else value.clone() for name, value in before.items()})
        try:
            yield
        finally:
            self._buffers.update(before)

    @torch.no_grad()
    def commit(self) -> None:
        """End a mini-batch: update the running statistics from its micro-batches."""
        pending, self.pending = self.pending, {}
        if self.running_mean is None or self.running_var is None:
            return
        for call in sorted(pending):
            moments = pending[call]
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            share = self.momentum
            if share is None:  # a cumulative average
                share = 1.0 / float(self.num_batches_tracked) if self.num_batches_tracked is not None else 0.0
            self.running_mean.lerp_(moments.mean.to(self.running_mean), share)
            self.running_var.lerp_((moments.deviation / max(1, moments.values - 1)).to(self.running_var), share)


@cache
def _deferred(kind: type[BatchNorm]) -> type[DeferredBatchNorm]:
    """The deferred form of a class of norms."""
    return type(f"Deferred{kind.__name__}", (DeferredBatchNorm, kind), {"plain": kind, "__module__": __name__})


DeferredBatchNorm1d, DeferredBatchNorm2d, DeferredBatchNorm3d = map(
    _deferred, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
)  # by their names, under which pickled modules look for them


def begin_pass(stage: int) -> None:
    """One micro-batch begins on one stage: several calls of one norm are kept apart until `end_passes`."""
    _run.stage, _run.calls = stage, {}


def end_passes() -> None:
    """What calls norms now is no run of a step."""
    _run.stage, _run.calls = 0, None


def commit_shared(norms: Sequence[tuple[DeferredBatchNorm, tuple[int, ...]]], transport: Transport) -> None:
    """End a mini-batch: the statistics of all replicas together make one. Collective.

    Args:
        norms: the norms of this process, each with the processes that hold it; the same order on all of these.
        transport: reaches these processes.
    """
    by_members: dict[tuple[int, ...], list[DeferredBatchNorm]] = {}
    for norm, members in norms:
        by_members.setdefault(members, []).append(norm)
    for members in sorted(by_members):
        if len(members) > 1:
            _merge(by_members[members], members, transport)
        for norm in by_members[members]:
            norm.commit()


def _merge(norms: Sequence[DeferredBatchNorm], members: tuple[int, ...], transport: Transport) -> None:
    """Merge what the members noted, in the same order on all of them: the results are the same to the last bit."""
    noted = [(number, call, moments) for number, norm in enumerate(norms) for call, moments in norm.pending.items()]
    keys = [(number, call, moments.values) for number, call, moments in noted]
    parts = [part for _, _, moments in noted for part in (moments.mean, moments.deviation)]
    # one tensor: to send it, the host waits for a GPU once
    flat = torch.cat(parts) if parts else torch.zeros(0)
    for norm in norms:
        norm.pending = {}
    for theirs, values in transport.all_gather_object((keys, flat), members):
        rows = torch.split(values, [norms[number].num_features for number, _, _ in theirs for _ in range(2)])
        for (number, call, count), mean, deviation in zip(theirs, rows[::2], rows[1::2], strict=True):
            moments, pending = Moments(count, mean, deviation), norms[number].pending
            pending[call] = pending[call].merge(moments) if call in pending else moments


def check_norms(module: nn.Module, processes: int, *, every: bool = False) -> None:
    """Refuse batch norms that wait for all processes.

    Args:
        module: the user's module.
        processes: how many there are.
        every: whether all batch norms are to do so.

    Raises:
        ConfigurationError: there is one.
    """
    if processes > 1 and (every or any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())):
        raise ConfigurationError(
            "SyncBatchNorm waits for all processes, and on a pipeline these run different layers.",
            hint="Use plain batch norm, without sync_batchnorm=True: with deferred_batch_norm=True all replicas share "
            "running statistics. Larger micro-batches let norms see more samples.",
        )
