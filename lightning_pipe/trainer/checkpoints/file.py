"""Writes a checkpoint file whose tensors come one by one, so that they are never in memory together."""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_default_mmap_options

from lightning_pipe.errors import CheckpointError
from lightning_pipe.trainer.checkpoints.rank_entries import Pending, replace_tensors
from lightning_pipe.trainer.checkpoints.unfinished import naming, replacing

_CHUNK = 16 << 20


def write(path: str, tree: Any, fill: Callable[[Any, Tensor], None]) -> None:
    """Write what ``torch.save`` would write if everything were here.

    First everything is saved with room for what is missing (memory that is reserved but never touched), then the file
    itself is mapped into memory and each missing tensor is written into its place.

    Args:
        path: the file; it appears when it is complete.
        tree: the checkpoint, with `Pending` and tensors of accelerators in the place of what is to be filled in.
        fill: writes one of these into a tensor that is part of the file.
    """
    missing: dict[Any, Tensor] = {}

    def reserve(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
            return leaf
        key = leaf if isinstance(leaf, Pending) else id(leaf)
        if key not in missing:
            missing[key] = torch.empty(leaf.shape, dtype=leaf.dtype)
        return missing[key]

    with replacing(path) as unfinished:
        with naming(path, unfinished):
            torch.save(replace_tensors(tree, reserve, (Pending, Tensor)), unfinished)
        missing.clear()
        _fill(unfinished, tree, fill)
        if get_crc32_options():
            _correct_checksums(unfinished)


def read(path: str, weights_only: bool | None) -> Any:
    """Read a file; it is mapped into memory where that is possible, so that only what is used is read.

    Raises:
        CheckpointError: it is none, or not a whole one.
    """
    try:
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        except (RuntimeError, pickle.UnpicklingError) as error:
            if "mmap" not in str(error):  # a file in torch's old format
                raise
        return torch.load(path, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if "weights_only" not in str(error):
            raise _unreadable(path, error) from None
        error.add_note(f"The file is {path}.")
        raise
    except (RuntimeError, OSError, EOFError, LookupError, ValueError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str, error: BaseException) -> CheckpointError:
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    text = (str(error).splitlines() or [""])[0]
    return CheckpointError(
        f"{path} ({size:,} bytes) cannot be read as a checkpoint: {type(error).__name__}: {text}",
        hint="It may be incomplete, or something else. Resume from another checkpoint.",
    )


def _fill(path: str, tree: Any, fill: Callable[[Any, Tensor], None]) -> None:
    with set_default_mmap_options(mmap.MAP_SHARED):
        # written by ourselves a moment ago
        stored = torch.load(path, mmap=True, weights_only=False)
    done: set[Any] = set()
    wanted: list[tuple[Any, Tensor]] = []
    for leaf, place in _side_by_side(tree, stored):
        key = leaf if isinstance(leaf, Pending) else id(leaf)
        if key not in done and (isinstance(leaf, Pending) or leaf.device.type != "cpu"):
            done.add(key)
            wanted.append((leaf, place))
    # in the order in which the other ranks send
    wanted.sort(key=lambda pair: (pair[0].rank, pair[0].number) if isinstance(pair[0], Pending) else (-1, 0))
    for leaf, place in wanted:
        fill(leaf, place)


def _side_by_side(tree: Any, stored: Any) -> Iterator[tuple[Any, Tensor]]:
    if isinstance(tree, Pending | Tensor):
        yield tree, stored
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _side_by_side(value, stored[key])
    elif type(tree) in (list, tuple):
        for value, other in zip(tree, stored, strict=True):
            yield from _side_by_side(value, other)


def _correct_checksums(path: str) -> None:
    """Give the zip records that were written later their checksums. torch does not look at them, other tools do."""
    with open(path, "r+b") as file:
        with zipfile.ZipFile(file) as archive:
            records = {info.filename: info for info in archive.infolist()}
            directory = archive.start_dir
        with mmap.mmap(file.fileno(), 0) as data:
            position = directory
            while data[position : position + 4] == b"PK\x01\x02":
                name_size, extra_size, comment_size = struct.unpack_from("<HHH", data, position + 28)
                info = records[data[position + 46 : position + 46 + name_size].decode()]
                header_name, header_extra = struct.unpack_from("<HH", data, info.header_offset + 26)
                start = info.header_offset + 30 + header_name + header_extra
                checksum = 0
                for chunk in range(start, start + info.file_size, _CHUNK):
                    checksum = zlib.crc32(data[chunk : min(chunk + _CHUNK, start + info.file_size)], checksum)
                if checksum != info.CRC:
                    struct.pack_into("<I", data, position + 16, checksum)
                    # torch writes size and checksum behind the data, after a signature
                    struct.pack_into("<I", data, start + info.file_size + 4, checksum)
                position += 46 + name_size + extra_size + comment_size
