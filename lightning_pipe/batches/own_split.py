"""Recognises along which dimension of every tensor a batch has been split, by a user's ``split_batch`` above all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipe.engine.batch_kinds import kind_of
from lightning_pipe.engine.containers import children, rebuild

_WHOLE = -1
"""In the place of a dimension: what belongs to all samples."""


class _OtherError(Exception):
    """The micro-batches are no slices of the batch."""


def slices_of(batch: Any, parts: Sequence[Any]) -> tuple[list[int], Any] | None:
    """Recognise micro-batches as slices of a batch; ``None`` if they are something else.

    Returns:
        The samples of each; and the dimension that was split, in containers like those of the batch, -1 for what
        belongs to all samples.

    Example:
        >>> batch = {"x": torch.zeros(7, 5), "y": torch.zeros(5)}
        >>> parts = [{"x": batch["x"][:, :3], "y": batch["y"][:3]}, {"x": batch["x"][:, 3:], "y": batch["y"][3:]}]
        >>> slices_of(batch, parts)
        ([3, 2], {'x': 1, 'y': 0})
    """
    sizes: list[int] = []
    try:
        axes = _axes(batch, parts, sizes)
    except _OtherError:
        return None
    return (sizes, axes) if sizes else None


def _axes(node: Any, parts: Sequence[Any], sizes: list[int]) -> Any:
    """The dimensions that were split in one node of the batch; the sizes that are found must be the same everywhere."""
    types = {type(part) for part in parts}
    if types != {type(node)} and (type(node), types) != (list, {tuple}):  # DataLoaders make lists of tuples
        raise _OtherError
    if isinstance(node, Tensor | np.ndarray):
        return _axis(node, parts, sizes)
    contents = children(node)
    if contents is None:
        if any(part is not node and (kind_of(node) is not None or part != node) for part in parts):
            raise _OtherError
        return _WHOLE
    columns = [children(part) or {} for part in parts]
    if all(column.keys() == contents.keys() for column in columns):
        return {key: _axes(child, [column[key] for column in columns], sizes) for key, child in contents.items()}
    if not isinstance(node, list | tuple) or sum(map(len, parts)) != len(node):
        raise _OtherError
    return _agreed(0, list(map(len, parts)), sizes)


def _axis(node: Any, parts: Sequence[Any], sizes: list[int]) -> int:
    if all(part.shape == node.shape for part in parts):
        return _WHOLE
    for axis in range(node.ndim):
        rest = (*node.shape[:axis], *node.shape[axis + 1 :])
        others = [(*part.shape[:axis], *part.shape[axis + 1 :]) for part in parts if part.ndim == node.ndim]
        if others == [rest] * len(parts) and sum(part.shape[axis] for part in parts) == node.shape[axis]:
            return _agreed(axis, [part.shape[axis] for part in parts], sizes)
    raise _OtherError


def _agreed(axis: int, found: list[int], sizes: list[int]) -> int:
    if sizes and sizes != found:
        raise _OtherError
    sizes[:] = found
    return axis


def put_together(parts: Sequence[Any], axes: Any) -> Any:
    """Some slices of a batch as one, given along which dimensions it was split."""
    first = parts[0]
    if isinstance(axes, dict):
        columns = [children(part) or {} for part in parts]
        return rebuild(
            first, {key: put_together([column[key] for column in columns], axis) for key, axis in axes.items()}
        )
    if axes == _WHOLE:
        return first
    if isinstance(first, Tensor):
        return torch.cat([*parts], axes)
    if isinstance(first, np.ndarray):
        return np.concatenate([*parts], axes)
    return type(first)(one for part in parts for one in part)
