"""Predictions of replicas, put together in the order of the dataset: what one device returns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
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
    samples, structures = zip(*map(_samples, shares), strict=True)
    found = [structure for of_share in structures for structure in of_share]
    if any(structure is None or structure != found[0] for structure in found):
        return None
    # by turns, as they were dealt out
    rows = [row for dealt in zip_longest(*samples) for row in dealt if row is not None]
    size = shares[0].batch_size
    batches = [_joined(rows[low : low + size]) for low in range(0, len(rows), size)]
    if any(leaves is None for leaves in batches):
        return None
    return [tree_unflatten(leaves, found[0]) for leaves in batches if leaves is not None]


def _samples(share: Share) -> tuple[list[list[Any]], list[Any]]:
    """The leaves of each sample, and the structure of each batch, ``None`` where a leaf has no entry for a sample."""
    rows, structures = [], []
    for prediction, size in zip(share.batches, share.sizes, strict=True):
        leaves, structure = _flattened(prediction, size)
        structures.append(structure)
        rows += [] if structure is None else [[leaf[place] for leaf in leaves] for place in range(size)]
    return rows, structures


def _flattened(prediction: Any, size: int) -> tuple[list[Any], Any]:
    """The leaves and the structure, lists with one entry for each sample among the leaves; ``None``: something else."""

    def is_row(value: Any) -> bool:
        return isinstance(value, list) and len(value) == size and not any(isinstance(each, Tensor) for each in value)

    leaves, structure = tree_flatten(prediction, is_leaf=is_row)
    fits = all(is_row(leaf) or (isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size) for leaf in leaves)
    return leaves, structure if fits else None


def _joined(rows: Sequence[Sequence[Any]]) -> list[Any] | None:
    """The leaves of a batch; ``None`` if those of its samples do not fit into one tensor."""
    leaves: list[Any] = []
    for column in zip(*rows, strict=True):
        kinds = {(value.dtype, value.shape) if isinstance(value, Tensor) else None for value in column}
        if len(kinds) != 1:
            return None
        leaves.append([*column] if None in kinds else torch.stack(column))
    return leaves
