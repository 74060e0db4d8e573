"""Predictions of replicas, put together in the order of the dataset: what one device returns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch import Tensor

from lightning_pipe.lightning_internals import IndexBatchSampler
from lightning_pipe.torch_internals import tree_flatten, tree_unflatten


class Share(NamedTuple):
    """What one replica has predicted of one dataset.

    Args:
        batches: what the step returned for each batch.
        sizes: samples of each batch.
        batch_size: samples of a batch that is full.
    """

    batches: Sequence[Any]
    sizes: Sequence[int]
    batch_size: int


def share_of(batches: Sequence[Any], loader: Any) -> Share | None:
    """This replica's share; ``None`` unless it has every ``d``-th sample of the dataset, as Lightning deals them out.

    Args:
        batches: what the step returned for each batch.
        loader: that of the batches.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, IndexBatchSampler):
        return None
    dealt = isinstance(getattr(sampler, "sampler", None), UnrepeatedDistributedSampler)
    size, sizes = getattr(sampler, "batch_size", None), [len(each) for each in sampler.seen_batch_indices]
    if not dealt or not isinstance(size, int) or len(sizes) < len(batches):
        return None
    return Share(batches, sizes[: len(batches)], size)


def in_order(shares: Sequence[Share]) -> list[Any] | None:
    """The predictions for the batches of one device.

    Replica ``r`` of ``d`` has the samples ``r``, ``r + d``, ...; with two replicas and batches of two::

        replica 0:  | 0 2 | 4 6 |        one device:  | 0 1 | 2 3 | 4 5 | 6 7 |
        replica 1:  | 1 3 | 5 7 |

    Args:
        shares: of all replicas.

    Returns:
        ``None`` if a prediction has other parts than tensors and lists with one entry for each sample.

    Example:
        >>> one = Share([torch.tensor([0, 2]), torch.tensor([4])], [2, 1], batch_size=2)
        >>> in_order([one, Share([torch.tensor([1, 3])], [2], batch_size=2)])
        [tensor([0, 1]), tensor([2, 3]), tensor([4])]
    """
    flat = [[_flattened(*pair) for pair in zip(share.batches, share.sizes, strict=True)] for share in shares]
    structures = [structure for batches in flat for _, structure in batches]
    if not structures:
        return []
    if any(structure is None or structure != structures[0] for structure in structures):
        return None
    total, size = sum(sum(share.sizes) for share in shares), shares[0].batch_size
    columns = []
    for place in range(structures[0].num_leaves):
        column = [_Column([leaves[place] for leaves, _ in batches]) for batches in flat]
        parts = [_interleaved(column, low, min(low + size, total)) for low in range(0, total, size)]
        if any(part is None for part in parts):
            return None
        columns.append(parts)
    return [tree_unflatten(list(leaves), structures[0]) for leaves in zip(*columns, strict=True)]


def _flattened(prediction: Any, size: int) -> tuple[list[Any], Any]:
    """The leaves and the structure, lists with one entry for each sample among the leaves; ``None``: something else."""

    def is_row(value: Any) -> bool:
        return isinstance(value, list) and len(value) == size and not any(isinstance(each, Tensor) for each in value)

    leaves, structure = tree_flatten(prediction, is_leaf=is_row)
    fits = all(is_row(leaf) or (isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size) for leaf in leaves)
    return leaves, structure if fits else None


class _Column:
    """One part of the predictions of one replica, from the first to the last sample."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches
        self._starts = [0, *accumulate(map(len, batches))]

    def between(self, low: int, high: int) -> list[Any]:
        """The pieces of batches with the samples from ``low`` to ``high``."""
        found = []
        for start, batch in zip(self._starts, self._batches, strict=False):
            piece = batch[max(low - start, 0) : max(high - start, 0)]
            if len(piece):
                found.append(piece)
        return found


def _interleaved(column: Sequence[_Column], low: int, high: int) -> Any:
    """The samples ``low`` to ``high`` of the dataset; ``None`` if they do not fit into one tensor."""
    replicas = len(column)
    rows: list[Any] = [None] * (high - low)
    kinds = set()
    for replica, own in enumerate(column):
        first, end = -(-(low - replica) // replicas), -(-(high - replica) // replicas)
        pieces = own.between(max(first, 0), max(end, 0))
        kinds |= {(type(piece), getattr(piece, "dtype", None), getattr(piece, "shape", (0,))[1:]) for piece in pieces}
        for number, row in enumerate((row for piece in pieces for row in piece), start=max(first, 0)):
            rows[number * replicas + replica - low] = row
    if len(kinds) != 1:
        return None
    return torch.stack(rows) if isinstance(rows[0], Tensor) else rows
