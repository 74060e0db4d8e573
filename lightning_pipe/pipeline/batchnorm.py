"""Batch norm over micro-batches: normalise by the micro-batch, keep the statistics of the whole mini-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.pipeline.recompute import is_recomputing
from lightning_pipe.pipeline.transport import Transport

Module = TypeVar("Module", bound=nn.Module)


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


class DeferredBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm whose running statistics are those of whole mini-batches.

    In training every micro-batch is normalised by its own statistics; the running mean and the (unbiased) running
    variance, as `torch.nn.BatchNorm2d` keeps them, are updated once per mini-batch, by `commit`, from all its
    micro-batches together. Evaluation, parameters, buffers and keys are those of `torch.nn.BatchNorm2d`. The pipeline
    converts modules and commits by itself. Source: GPipe, arXiv:1811.06965v5, section 2.3.

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

    pending: Moments | None

    @staticmethod
    def convert(module: Module) -> Module:
        """Turn every ``BatchNorm1d``, ``2d`` and ``3d`` in ``module`` into its deferred form, in place."""
        for part in module.modules():
            deferred = _DEFERRED.get(type(part))
            if deferred is not None:
                part.__class__ = deferred
                part.pending = None  # type: ignore[assignment]
        return module

    @staticmethod
    def revert(module: Module) -> Module:
        """Undo `convert`."""
        for part in module.modules():
            if isinstance(part, DeferredBatchNorm):
                part.__class__ = _PLAIN[type(part)]  # type: ignore[assignment]
                del part.pending
        return module

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; in training, note the statistics for `commit`."""
        if not self.training or not self.track_running_stats:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if input.numel() // max(1, input.shape[1]) < 2:
            raise ConfigurationError(
                f"Batch norm needs more than one value per channel; this micro-batch has shape {tuple(input.shape)}.",
                hint="Use fewer micro-batches, so that each has at least two samples.",
            )
        if not is_recomputing():
            self._note(input.detach())
        return nn.functional.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)

    @torch.no_grad()
    def _note(self, values: Tensor) -> None:
        others = [axis for axis in range(values.dim()) if axis != 1]
        exact = values.dtype if values.dtype == torch.float64 else torch.float32
        variance, mean = torch.var_mean(values.to(exact), others, correction=0)
        count = values.numel() // values.shape[1]
        moments = Moments(count, mean, variance * count)
        self.pending = moments if self.pending is None else self.pending.merge(moments)

    @torch.no_grad()
    def commit(self) -> None:
        """End a mini-batch: update the running statistics from its micro-batches."""
        moments, self.pending = self.pending, None
        if moments is None or self.running_mean is None or self.running_var is None:
            return
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:  # a cumulative average
            share = 1.0 / float(self.num_batches_tracked) if self.num_batches_tracked is not None else 0.0
        self.running_mean.lerp_(moments.mean.to(self.running_mean), share)
        self.running_var.lerp_((moments.deviation / (moments.values - 1)).to(self.running_var), share)


class _Deferred1d(DeferredBatchNorm, nn.BatchNorm1d):
    pass


class _Deferred2d(DeferredBatchNorm, nn.BatchNorm2d):
    pass


class _Deferred3d(DeferredBatchNorm, nn.BatchNorm3d):
    pass


_DEFERRED: Mapping[type[nn.Module], type[DeferredBatchNorm]] = {
    nn.BatchNorm1d: _Deferred1d,
    nn.BatchNorm2d: _Deferred2d,
    nn.BatchNorm3d: _Deferred3d,
}
_PLAIN = {deferred: plain for plain, deferred in _DEFERRED.items()}


def commit_all(norms: Sequence[tuple[DeferredBatchNorm, tuple[int, ...]]], transport: Transport) -> None:
    """End a mini-batch: statistics of all replicas together make one.

    Args:
        norms: the norms of this process, each with the processes that hold it; the same order on all of these.
        transport: reaches them.
    """
    by_members: dict[tuple[int, ...], list[DeferredBatchNorm]] = {}
    for norm, members in norms:
        by_members.setdefault(members, []).append(norm)
    for members in sorted(by_members):
        if len(members) > 1:
            _share(by_members[members], members, transport)
        for norm in by_members[members]:
            norm.commit()


def discard_all(module: nn.Module) -> None:
    """Forget a mini-batch that was given up."""
    for norm in deferred_norms(module):
        norm.pending = None


def deferred_norms(module: nn.Module) -> Iterator[DeferredBatchNorm]:
    """The deferred norms in a module."""
    return (part for part in module.modules() if isinstance(part, DeferredBatchNorm))


def _share(norms: Sequence[DeferredBatchNorm], members: tuple[int, ...], transport: Transport) -> None:
    """Merge what the members noted, in the same order on all of them: the results are the same to the last bit."""
    width = sum(2 * norm.num_features + 1 for norm in norms)
    table = torch.zeros(len(members), width, dtype=torch.float64, device=transport.device)
    row, offset = table[members.index(transport.process)], 0
    for norm in norms:
        if norm.pending is not None:
            row[offset] = norm.pending.values
            mean, deviation = norm.pending.mean, norm.pending.deviation
            row[offset + 1 : offset + 1 + 2 * norm.num_features] = torch.cat([mean, deviation])
        offset += 2 * norm.num_features + 1
    transport.all_reduce(table, members).wait()
    offset = 0
    for norm in norms:
        total: Moments | None = None
        for values in table[:, offset : offset + 2 * norm.num_features + 1]:
            mean, deviation = values[1:].chunk(2)
            moments = Moments(int(values[0]), mean, deviation)
            total = moments if total is None else total.merge(moments)
        norm.pending = total if total is not None and total.values else None
        offset += 2 * norm.num_features + 1
