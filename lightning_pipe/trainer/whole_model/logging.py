"""Records what a step logs on the last stage, merges it over micro-batches, and logs it alike on all ranks."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipe.batches.outputs import to_host
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.absent_tensor import AbsentTensor, check_value
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.lightning_internals import ResultMetric
from lightning_pipe.patches import replaced
from lightning_pipe.torch_internals import DisableTorchFunction

_log, _to = pl.LightningModule.log, ResultMetric.to
_OPTIONS = tuple(inspect.signature(_log).parameters)[3:]  # behind the module, the name and the value
_REDUCTIONS = ("mean", "sum", "min", "max")


LogKey = tuple[str, str, int]
"""What the calls of ``self.log`` in different micro-batches have in common: the dotted name of the LightningModule that
logged (empty for the outermost), the value's name, and how often the same step had logged that name before."""


@dataclass
class Merged:
    """What some micro-batches logged under one key: one of them when it is recorded, all of a rank from `merge` on.

    Args:
        key: names it.
        metric: dotted name of the metric that is logged.
        options: the other arguments of ``log``.
        reduction: how the values of micro-batches make that of the batch: ``"mean"``, ``"sum"``, ``"min"``, ``"max"``.
        values: of the micro-batches; until `merge` a tensor with one element, for a metric what its ``forward`` has
            computed, if anything.
        weights: of the values in a mean, from `merge` on.
        dtype: of the values, from `merge` on; ``None`` for a metric without a value.
        is_loss: whether each of them was the loss of its micro-batch.
        constant: whether ``batch_size`` among the options is that of a whole batch, in each micro-batch.
        origin: the tensor that was logged; on a later stage its value may come after the call.
    """

    key: LogKey
    metric: str | None
    options: dict[str, Any]
    reduction: str
    values: list[Any]
    weights: list[float] = field(default_factory=list)
    dtype: torch.dtype | None = None
    is_loss: bool = False
    constant: bool = False
    origin: Tensor | None = None

    def complete(self) -> None:
        """Take a value that has come after the call. That it is used lets the earlier stage send it in every batch."""
        if isinstance(self.values[0], Placeholder) and self.origin is not None:
            self.values = [self.origin.detach().clone()]
        self.origin = None

    @property
    def result(self) -> float:
        """The value for all of them."""
        values: list[float] = self.values
        if self.reduction == "mean":
            pairs = zip(values, self.weights, strict=True)
            return sum([value * weight for value, weight in pairs if weight]) / (self.weight or 1.0)
        if self.reduction == "sum":
            return sum(values)
        if any(map(math.isnan, values)):
            return math.nan
        return min(values) if self.reduction == "min" else max(values)

    @property
    def weight(self) -> float:
        """Samples behind the value."""
        return sum(self.weights)

    def merge(self, other: Merged) -> None:
        """Add what other micro-batches logged."""
        self.values += other.values
        self.weights += other.weights
        self.is_loss &= other.is_loss


Logged = dict[int, dict[LogKey, Merged]]
"""What was logged in each micro-batch."""


@dataclass
class Log:
    """Records ``self.log`` while steps run.

    Args:
        module: the LightningModule.
        metrics: dotted name of each metric in it, by ``id``.
    """

    module: nn.Module
    metrics: Mapping[int, str]
    _current: dict[LogKey, Merged] | None = None
    _whole: set[tuple[LogKey, float]] = field(default_factory=set)  # sizes of whole batches, given as ``batch_size``

    def __post_init__(self) -> None:
        named = self.module.named_modules()
        self._names = {id(part): name for name, part in named if isinstance(part, pl.LightningModule)}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Around a run: catch the calls, on the class, so that a ``log`` of the user's own comes first.

        Hooks log at once, but not what comes from parameters of other ranks: Lightning would take it.
        """
        names = self._names

        def log(module: pl.LightningModule, name: str, value: Any, *args: Any, **options: Any) -> None:
            if self._current is not None and id(module) in names:
                given = dict(zip(_OPTIONS, args, strict=False)) | options
                self._record(names[id(module)], module, name, value, given)
                return
            if isinstance(value, AbsentTensor):
                raise value.origin.error(
                    f"self.log({name!r}, …) is given a number that comes from parameters of other ranks",
                    "Log what the step computes, or the norm of all gradients by trainer.strategy.grad_norm().",
                )
            _log(module, name, value, *args, **options)

        with replaced(pl.LightningModule, "log", log), replaced(ResultMetric, "to", _move, gated=False):
            yield

    def recording(self, logged: Logged, micro_batch: int) -> Log:
        """Around one run of the step: what the first one that does not end early logs stands for its micro-batch."""
        self._logged, self._micro_batch = logged, micro_batch
        return self

    def __enter__(self) -> None:
        self._current = {}

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        entries, self._current = self._current or {}, None
        if error is None:
            for entry in entries.values():
                entry.complete()
            self._logged.setdefault(self._micro_batch, entries)

    def merge(
        self, logged: Logged, samples: Sequence[float], amounts: Sequence[float], losses: Mapping[int, float]
    ) -> list[Merged]:
        """What was logged, over the micro-batches of this rank.

        A step that gives ``batch_size=`` the samples of a whole batch does so in every micro-batch, and in batches that
        have fewer: they count what they do without. Any other number is one of the micro-batch's own.

        Args:
            logged: the entries of each micro-batch.
            samples: of every micro-batch of the batch.
            amounts: what each of them counts in means.
            losses: of every micro-batch, to tell which of the values are the loss; empty if nobody asks.
        """
        found = [(micro_batch, one) for micro_batch, entries in sorted(logged.items()) for one in entries.values()]
        values = to_host([one.values[0] for _, one in found])
        for (micro_batch, one), value in zip(found, values, strict=True):
            tensor, given = one.values[0], one.options.get("batch_size")
            if tensor is not None:
                one.dtype = tensor.dtype if tensor.dtype.is_floating_point else _default_dtype()
            if given is not None and len(samples) > 1:
                if given == sum(samples):
                    self._whole.add((one.key, given))
                one.constant = (one.key, given) in self._whole
            counts = amounts[micro_batch] if given is None or one.constant else given
            one.values, one.weights = [value], [float(counts)]
            one.is_loss = value == losses.get(micro_batch)
        return combine([one for _, one in found])

    def replay(
        self, merged: Iterable[Merged], micro_batches: int, device: torch.device, *, own_batch: bool = True
    ) -> None:
        """Log for the whole batch what its micro-batches have logged.

        Args:
            merged: of all ranks with a loss, combined.
            micro_batches: how many the batch has.
            device: where values belong.
            own_batch: whether it is the batch that the Trainer takes the number of samples from.
        """
        for one in merged:
            owner, name, _ = one.key
            module: Any = self.module.get_submodule(owner)
            options = dict(one.options)
            partial = len(one.values) < micro_batches or not own_batch
            counted = options.get("batch_size") is not None
            if not one.constant and (counted or (partial and _reduction(options.get("reduce_fx", "mean")) == "mean")):
                options["batch_size"] = int(one.weight) if one.weight.is_integer() else one.weight
            # filled on the device: the host would wait for a copy
            value: Any = None if one.dtype is None else torch.full((), one.result, dtype=one.dtype, device=device)
            if one.metric is not None:
                metric: Any = self.module.get_submodule(one.metric)
                metric._forward_cache = value
                value, options["metric_attribute"] = metric, one.metric
            _log(module, name, value, **options)

    def _record(self, owner: str, module: pl.LightningModule, name: str, value: Any, options: dict[str, Any]) -> None:
        if options.get("sync_dist_group") is not None:
            raise ConfigurationError(
                f"self.log({name!r}, sync_dist_group=…) names a process group; with a pipeline the ranks of a group "
                "do not run the same part of the step.",
                hint="Leave sync_dist_group out: sync_dist=True reduces over the replicas.",
            )
        metric: str | None = None
        if not isinstance(value, Tensor) and isinstance(value, Metric):
            metric = options.pop("metric_attribute", None) or self.metrics.get(id(value))
            if metric is None:
                raise ConfigurationError(
                    f"self.log({name!r}, …) is given a metric that is no attribute of the LightningModule.",
                    hint="Create the metric in __init__ or setup and keep it as an attribute.",
                )
            value = value._forward_cache
        if isinstance(value, Tensor):
            check_value(value, f"self.log({name!r}, …)")
        # the interceptor must not take these torch calls for calls of the step
        with DisableTorchFunction():
            kept = single_value(value)
            if kept is None and metric is None:
                _log(module, name, value, **options)  # raises Lightning's own error
                return
        assert self._current is not None
        occurrence = sum(key[:2] == (owner, name) for key in self._current)
        key, origin = (owner, name, occurrence), value if isinstance(value, Tensor) else None
        reduction = "mean" if metric else _reduction(options.get("reduce_fx", "mean"))
        self._current[key] = Merged(key, metric, options, reduction, [kept], origin=origin)


def _move(metric: Any, *args: Any, **options: Any) -> Any:
    """In the place of the method ``to``: a logged value whose sum is on the device is not brought there again.

    Lightning does so for every value of every batch, and copies all that it keeps beside the sum: two thirds of what
    ``self.log`` costs (Lightning 2.6). Each rank of a pipeline logs for itself, while the others wait for it.
    """
    here = metric.is_tensor and not options and args == (metric.value.device,)
    return metric if here else _to(metric, *args, **options)


def combine(merged: Iterable[Merged]) -> list[Merged]:
    """Merge what was logged under the same key."""
    result: dict[LogKey, Merged] = {}
    for one in merged:
        if (known := result.setdefault(one.key, one)) is not one:
            known.merge(one)
    return list(result.values())


def single_value(value: Any) -> Tensor | None:
    """A number as a tensor of its own; ``None`` for what cannot be logged."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() == 1 else None
    return torch.tensor(value, dtype=_default_dtype()) if isinstance(value, numbers.Real) else None


def _reduction(function: Any) -> str:
    name = (function if isinstance(function, str) else getattr(function, "__name__", "")).lower()
    name = {"avg": "mean", "amin": "min", "amax": "max"}.get(name, name)
    # anything else is refused by Lightning when it is logged
    return name if name in _REDUCTIONS else "mean"


def _default_dtype() -> torch.dtype:
    dtype = torch.get_default_dtype()
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
