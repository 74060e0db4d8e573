"""A folder of shards as one ordinary checkpoint, tensor by tensor: neither is ever in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from lightning_pipe.errors import CheckpointError
from lightning_pipe.trainer.checkpoints import file, folder
from lightning_pipe.trainer.checkpoints.rank_entries import Pending, assembled, pieces

_AT_ONCE = 64 << 20


def consolidate(source: str, target: str) -> int:
    """Write an ordinary ``.ckpt`` from a folder.

    Args:
        source: a checkpoint of ``PipeStrategy(save_distributed_checkpoint=True)``.
        target: the file.

    Returns:
        The number of tensors.

    Raises:
        CheckpointError: the folder is no such checkpoint, or is not complete.
    """
    if not folder.is_folder(source):
        raise CheckpointError(
            f"{source} is no checkpoint in a folder: it has no {folder.REST}.",
            hint="Name a folder of PipeStrategy(save_distributed_checkpoint=True).",
        )
    rest = folder.read_rest(source, weights_only=False)
    keys = list(dict.fromkeys(key for _, key in rest["tensors"]))
    numbers = {key: number for number, key in enumerate(keys)}
    leaves = {key: Pending(0, numbers[key], tuple(like.shape), like.dtype) for key, like in rest["like"].items()}
    entries: list[tuple[tuple[Any, ...], Any]] = [(tuple(at), value) for at, value in rest["values"]]
    tree = assembled(rest["checkpoint"], [*entries, *((tuple(at), leaves[key]) for at, key in rest["tensors"])])
    read = _Distributed(source, keys, [leaves[key] for key in keys])
    file.write(target, tree, read)
    return len(keys)


class _Distributed:
    """Reads tensors in the order of their numbers, some small ones together: each reading looks into the index.

    Args:
        source: the folder.
        keys: names of the tensors.
        leaves: what stands in their place.
    """

    def __init__(self, source: str, keys: Sequence[str], leaves: Sequence[Pending]) -> None:
        self._source, self._keys, self._leaves = source, keys, leaves
        self._here: dict[str, Tensor] = {}

    def __call__(self, leaf: Pending) -> Iterator[Tensor]:
        key = self._keys[leaf.number]
        if key not in self._here:
            size = 0
            for other, name in zip(self._leaves[leaf.number :], self._keys[leaf.number :], strict=True):
                self._here[name] = torch.empty(other.shape, dtype=other.dtype)
                size += self._here[name].nbytes
                if size >= _AT_ONCE:
                    break
            load_tensors(self._here, checkpoint_id=self._source, no_dist=True)
        yield from pieces(self._here.pop(key))


def default_target(source: str) -> str:
    """The file beside a folder.

    Example:
        >>> default_target("checkpoints/last.ckpt/")
        'checkpoints/last.whole.ckpt'
    """
    base = source.rstrip(os.sep)
    return f"{base.removesuffix('.ckpt')}.whole.ckpt" if base.endswith(".ckpt") else f"{base}.ckpt"
