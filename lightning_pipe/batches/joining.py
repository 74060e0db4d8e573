"""Joins what the step returned for micro-batches to what one step over the whole batch would have.

The kind of a value says how: rows, one for each sample, are concatenated, numbers with a fraction averaged by weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipe.intercept.kept_state import alike


def join(
    outputs: Mapping[int, Any],
    sizes: Sequence[int],
    weights: Sequence[float],
    unclear: Callable[[str], None] = lambda path: None,
) -> Any:
    """What one step over the whole batch would have returned, from what its micro-batches returned.

    Tensors, arrays and lists with one row per sample are concatenated. Single floating-point numbers are averaged by
    weight. What is the same for all micro-batches stays as it is. Other lists of equal length are joined element by
    element. Of the rest there is a list, with one entry for each micro-batch: also of whole numbers that are those of
    the samples, or in tensors, which may be equal by chance.

    Args:
        outputs: what the step returned for each micro-batch.
        sizes: samples of every micro-batch.
        weights: share of every micro-batch; they add up to 1.
        unclear: called with the place of what becomes a list.

    Example:
        >>> join({0: {"n": torch.tensor(1.0)}, 1: {"n": torch.tensor(4.0)}}, [2, 1], [2 / 3, 1 / 3])
        {'n': tensor(2.)}
    """
    values = [outputs[index] for index in sorted(outputs)]
    return _Join(sizes, weights, unclear).of("", values)


@dataclass
class _Join:
    sizes: Sequence[int]
    weights: Sequence[float]
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
        numbers = [number for number in map(_number, values) if number is not None]
        if len(numbers) == len(values):
            if _is_float(first):
                return self._mean(numbers, first)
            if isinstance(first, Tensor) or numbers == list(map(float, self.sizes)):
                return self._list(path, values)
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

    def _mean(self, numbers: Sequence[float], first: Any) -> Any:
        total = sum(number * weight for number, weight in zip(numbers, self.weights, strict=True) if weight)
        mean = total / (sum(self.weights) or 1.0)
        if isinstance(first, Tensor):
            return torch.tensor(mean, dtype=first.dtype, device=first.device)
        return type(first)(mean)

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
    return one is other or (single and alike(one, other))
