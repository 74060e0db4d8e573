"""Joins what the step returned or logged for micro-batches to what one step over the whole batch would have.

Rows, one for each sample, are concatenated. Numbers are averaged by weight, added, or reduced to the smallest or the
largest. The last stage learns which of these is meant when it runs the step on two micro-batches together
(`loss_check`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipe.engine.first_batch.loss_check import close
from lightning_pipe.intercept.tensor_state import same_content

Seen = tuple[float, float, float, float]
"""A number of one micro-batch, of another one, of both together, and the share of the first."""

RULES = ("mean", "sum", "min", "max")


@dataclass
class Number:
    """A number of some micro-batches, merged in every way that it may be meant.

    Args:
        weighted: the sum of value x weight.
        weight: the sum of the weights.
        total: the sum of the values.
        least: the smallest value.
        most: the largest value.
    """

    weighted: float
    weight: float
    total: float
    least: float
    most: float

    @classmethod
    def of(cls, value: float, weight: float) -> Number:
        """The number of one micro-batch."""
        return cls(value * weight, weight, value, value, value)

    def merge(self, other: Number) -> None:
        """Add other micro-batches."""
        self.weighted += other.weighted
        self.weight += other.weight
        self.total += other.total
        lost = math.isnan(self.least) or math.isnan(other.least)
        self.least = math.nan if lost else min(self.least, other.least)
        self.most = math.nan if lost else max(self.most, other.most)

    def result(self, rule: str) -> float:
        """The number for all of them."""
        if rule == "mean":
            return self.weighted / self.weight if self.weight else self.weighted
        return {"sum": self.total, "min": self.least, "max": self.most}[rule]


@dataclass
class Comparison:
    """Numbers of two micro-batches, compared with that of both together.

    Args:
        default: how such a number joins if nothing speaks against it.
        seen: the numbers.
        rounding: the largest difference that rounding can make.

    Example:
        >>> Comparison("mean", [(2.0, 3.0, 5.0, 0.5)]).rule, Comparison("mean", [(2.0, 2.0, 2.0, 0.5)]).rule
        ('sum', 'mean')
    """

    default: str
    seen: list[Seen]
    rounding: float = 0.0

    @property
    def judged(self) -> list[Seen]:
        """What can be judged."""
        return [each for each in self.seen if all(map(math.isfinite, each))]

    @property
    def rule(self) -> str | None:
        """How the number of the batch is made; ``None``: in none of these ways, or it is not clear."""
        fitting = [rule for rule in (*RULES, "same") if all(_fits(rule, each, self.rounding) for each in self.judged)]
        if self.default in fitting:
            return self.default
        return fitting[0] if len(fitting) == 1 else None

    def example(self) -> Seen:
        """The first numbers that do not join by default."""
        return next(each for each in self.judged if not _fits(self.default, each, self.rounding))


def _fits(rule: str, seen: Seen, rounding: float) -> bool:
    one, other, both, share = seen
    if rule == "same":
        return one == other == both
    merged = Number.of(one, share)
    merged.merge(Number.of(other, 1 - share))
    return close(merged.result(rule), both, rounding)


def numbers_in(output: Any, path: str = "") -> Iterator[tuple[str, float, str]]:
    """The single numbers in what a step returned, besides the loss: where, which, and how they join by default."""
    if isinstance(output, Mapping):
        for key, value in output.items():
            if path or key != "loss":
                yield from numbers_in(value, f"{path}[{key!r}]")
    elif path and (number := _number(output)) is not None:
        yield path, number, "mean" if _is_float(output) else "same"


def join(
    outputs: Mapping[int, Any],
    sizes: Sequence[int],
    weights: Sequence[float],
    rules: Mapping[str, str | None] | None = None,
    unclear: Callable[[str], None] = lambda path: None,
) -> Any:
    """What one step over the whole batch would have returned, from what its micro-batches returned.

    Tensors, arrays and lists with one row per sample are concatenated. Single numbers join by the rule that was seen;
    without one, floating-point numbers are averaged by weight. What is the same for all micro-batches stays as it is.
    Other lists of equal length are joined element by element. Of the rest there is a list, with one entry for each
    micro-batch: also of whole numbers that are those of the samples, as long as no rule was seen.

    Args:
        outputs: what the step returned for each micro-batch.
        sizes: samples of every micro-batch.
        weights: share of every micro-batch; they add up to 1.
        rules: how numbers join, by their place, as far as it was seen.
        unclear: called with the place of what becomes a list.

    Example:
        >>> join({0: {"n": torch.tensor(1.0)}, 1: {"n": torch.tensor(4.0)}}, [2, 1], [2 / 3, 1 / 3])
        {'n': tensor(2.)}
    """
    values = [outputs[index] for index in sorted(outputs)]
    return _Join(sizes, weights, rules or {}, unclear).of("", values)


@dataclass
class _Join:
    sizes: Sequence[int]
    weights: Sequence[float]
    rules: Mapping[str, str | None]
    unclear: Callable[[str], None]

    def of(self, path: str, values: list[Any]) -> Any:  # noqa: PLR0911
        first = values[0]
        if len(values) == 1:
            return first
        if all(isinstance(value, Mapping) for value in values):
            keys = dict.fromkeys(key for value in values for key in value)
            return {key: self._field(f"{path}[{key!r}]", key, values) for key in keys}
        if any(type(value) is not type(first) for value in values):
            return self._list(path, values)
        if isinstance(first, Tensor | np.ndarray) and self._are_rows(values):
            return torch.cat(values) if isinstance(first, Tensor) else np.concatenate(values)
        if (number := self._number(path, values)) is not None:
            return number
        if all(_same(value, first) for value in values):
            return first
        if isinstance(first, list | tuple) and not hasattr(first, "_fields"):
            return self._sequence(path, values)
        return self._list(path, values)

    def _field(self, path: str, key: Any, values: list[Any]) -> Any:
        if all(key in value for value in values):
            return self.of(path, [value[key] for value in values])
        return self._list(path, [value.get(key) for value in values])

    def _are_rows(self, values: Sequence[Any]) -> bool:
        return all(value.ndim and len(value) == size for value, size in zip(values, self.sizes, strict=True))

    def _number(self, path: str, values: list[Any]) -> Any:
        found = [_number(value) for value in values]
        if any(number is None for number in found):
            return None
        rule = self.rules.get(path) or ("mean" if _is_float(values[0]) else None)
        if rule is None and found == list(map(float, self.sizes)):
            return self._list(path, values)  # numbers of samples, or all the same by chance
        if rule in (None, "same"):
            return None
        merged = Number.of(found[0], self.weights[0])  # type: ignore[arg-type]
        for number, weight in zip(found[1:], self.weights[1:], strict=True):
            merged.merge(Number.of(number, weight))  # type: ignore[arg-type]
        result, first = merged.result(str(rule)), values[0]
        if isinstance(first, Tensor):
            return torch.tensor(result, dtype=first.dtype, device=first.device)
        return type(first)(result)

    def _sequence(self, path: str, values: list[Any]) -> Any:
        first = values[0]
        fields = all(isinstance(each, Tensor) and each.ndim for value in values for each in value) and all(
            len(each) == size for value, size in zip(values, self.sizes, strict=True) for each in value
        )
        if not fields and all(len(value) == size for value, size in zip(values, self.sizes, strict=True)):
            return type(first)(each for value in values for each in value)
        if all(len(value) == len(first) for value in values):
            columns = zip(*values, strict=True)
            return type(first)(self.of(f"{path}[{number}]", list(each)) for number, each in enumerate(columns))
        return self._list(path, values)

    def _list(self, path: str, values: list[Any]) -> list[Any]:
        self.unclear(path)
        return values


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        single = value.numel() == 1 and not value.is_complex() and value.dtype is not torch.bool
        return float(value) if single else None
    return float(value) if isinstance(value, int | float | np.number) and not isinstance(value, bool) else None


def _is_float(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float | np.floating)


def _same(one: Any, other: Any) -> bool:
    # Lists and tuples that are equal may hold an entry for each sample, and other objects may compare as they like.
    single = isinstance(one, Tensor | np.ndarray | str | bytes | int | float | np.generic)
    return one is other or (single and same_content(one, other))
