"""A folder of shards as one ordinary checkpoint, tensor by tensor: neither is ever in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from lightning_pipe.errors import CheckpointError
from lightning_pipe.trainer.checkpoints import file, folder
from lightning_pipe.trainer.checkpoints.rank_entries import Pending, assembled, pieces

_AT_ONCE = 64 << 20
_PIECE = 16 << 20
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def consolidate(source: str, target: str, prefix: str = "") -> int:
    """Write an ordinary ``.ckpt`` from a folder.

    Args:
        source: a checkpoint of ``PipeStrategy(save_distributed_checkpoint=True)``, or a folder of ``save_pretrained``.
        target: the file.
        prefix: put before the names of weights of ``save_pretrained``: the attribute that holds the model, with a dot.

    Returns:
        The number of tensors.

    Raises:
        CheckpointError: the folder holds neither, or is not complete.
    """
    if folder.is_folder(source):
        return _from_distributed(source, target)
    if any(Path(source, name).is_file() for name in (_INDEX, _SINGLE)):
        return _from_safetensors(source, target, prefix)
    raise CheckpointError(
        f"{source} is no checkpoint in a folder: it has no {folder.REST}, no {_INDEX} and no {_SINGLE}.",
        hint="Name a folder of PipeStrategy(save_distributed_checkpoint=True) or of save_pretrained().",
    )


def _from_distributed(source: str, target: str) -> int:
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


class _Stored(NamedTuple):
    """Where the bytes of a tensor of safetensors are."""

    path: Path
    start: int
    size: int


def _from_safetensors(source: str, target: str, prefix: str) -> int:
    index = Path(source, _INDEX)
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {_SINGLE}
    missing = sorted(name for name in names if not Path(source, name).is_file())
    if missing:
        raise CheckpointError(f"The folder {source} is not complete: it has no {', '.join(missing)}.")
    stored: list[_Stored] = []
    state: dict[str, Pending] = {}
    for path in (Path(source, name) for name in sorted(names)):
        for key, dtype, shape, place in _entries(path):
            state[f"{prefix}{key}"] = Pending(0, len(stored), shape, dtype)
            stored.append(place)
    # as much of a checkpoint as `load_from_checkpoint` asks for
    tree = {"state_dict": state, "pytorch-lightning_version": L.__version__, "epoch": 0, "global_step": 0}
    file.write(target, tree, lambda leaf: _read(stored[leaf.number]))
    return len(stored)


def _entries(path: Path) -> Iterator[tuple[str, torch.dtype, tuple[int, ...], _Stored]]:
    """The tensors in a file; its header is a dictionary after eight bytes with its length."""
    with path.open("rb") as source:
        length = int.from_bytes(source.read(8), "little")
        header = json.loads(source.read(length))
    for key, entry in header.items():
        if key != "__metadata__":
            if entry["dtype"] not in _DTYPES:
                raise CheckpointError(f"'{key}' in {path} has a type that is not known: {entry['dtype']}.")
            start, end = entry["data_offsets"]
            yield key, _DTYPES[entry["dtype"]], tuple(entry["shape"]), _Stored(path, 8 + length + start, end - start)


def _read(stored: _Stored) -> Iterator[Tensor]:
    with stored.path.open("rb") as source:
        source.seek(stored.start)
        left = stored.size
        while left and (data := source.read(min(left, _PIECE))):
            left -= len(data)
            yield torch.frombuffer(bytearray(data), dtype=torch.uint8)


def default_target(source: str) -> str:
    """The file beside a folder.

    Example:
        >>> default_target("checkpoints/last.ckpt/"), default_target("exported")
        ('checkpoints/last.whole.ckpt', 'exported.ckpt')
    """
    base = source.rstrip(os.sep)
    return f"{base.removesuffix('.ckpt')}.whole.ckpt" if base.endswith(".ckpt") else f"{base}.ckpt"
