"""Writes a checkpoint file whose tensors come one by one, so that they are never in memory together.

A file of torch is a zip archive: one record with the pickled structure, then one for each storage, in the order in
which the structure mentions them. It is written in two steps::

    torch.save, data left out     | structure | room for 0 | room for 1 | room for 2 | directory |
                                                    ^            ^
    pieces, as they come               from this process     from another rank, 16 MiB at a time
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.serialization import get_crc32_options, skip_data

from lightning_pipe.errors import CheckpointError
from lightning_pipe.patches import unheard
from lightning_pipe.trainer.checkpoints.rank_entries import Pending, pieces, replace_tensors, shared_memory
from lightning_pipe.trainer.checkpoints.unfinished import naming, replacing

_NOT_UNDERSTOOD = "compatible with your use case: WeightsUnpickler error:"
"""How torch (2.13) begins what it says of a file that holds no pickled structure, as a page of text does not."""

Contents = Callable[[Pending], Iterable[Tensor]]
"""The bytes of a tensor that is not here, in pieces."""


def write(path: str, tree: Any, contents: Contents) -> None:
    """Write what ``torch.save`` would write if everything were here.

    Besides what it has anyway, the process needs memory for one piece, and for one tensor if tensors are on an
    accelerator.

    Args:
        path: the file; it appears when it is complete.
        tree: the checkpoint, with `Pending` in the place of what is not here.
        contents: asked once for each `Pending`, in the order of ranks and numbers.
    """
    absent: dict[Any, tuple[Tensor, Pending | Tensor]] = {}

    def stand_in(leaf: Any) -> Tensor:
        """Memory that is reserved and never touched, for what is not in this host's memory."""
        if isinstance(leaf, Tensor) and (leaf.device.type in ("cpu", "meta") or leaf.layout is not torch.strided):
            return leaf
        key = leaf if isinstance(leaf, Pending) else shared_memory(leaf)
        if key not in absent:
            absent[key] = torch.empty(leaf.shape, dtype=leaf.dtype), leaf
        return absent[key][0]

    stored = replace_tensors(tree, stand_in, (Pending, Tensor))
    storages = _storages(stored)
    numbers = {storage._cdata: number for number, storage in enumerate(storages)}
    waiting = {numbers[tensor.untyped_storage()._cdata]: leaf for tensor, leaf in absent.values()}
    with replacing(path) as unfinished:
        with naming(path, unfinished), skip_data(), unheard(".*meta device under skip_data.*"):
            torch.save(stored, unfinished)
        with open(unfinished, "r+b") as file:
            archive = _Archive(file, path)
            for number, storage in enumerate(storages):
                if number not in waiting:
                    archive.fill(number, pieces(torch.empty(0, dtype=torch.uint8).set_(storage.cpu())))  # type: ignore[no-untyped-call]
            for number, leaf in sorted(waiting.items(), key=lambda pair: _turn(pair[1])):
                archive.fill(number, contents(leaf) if isinstance(leaf, Pending) else pieces(leaf))
            with naming(path, unfinished):
                archive.close()


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
        if _NOT_UNDERSTOOD in str(error) or "weights_only" not in str(error):
            raise _unreadable(path, error) from None
        error.add_note(f"The file is {path}.")
        raise
    except (RuntimeError, OSError, EOFError, LookupError, ValueError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: str, error: BaseException) -> CheckpointError:
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    text = (str(error).rpartition(_NOT_UNDERSTOOD)[2].strip().splitlines() or [""])[0]
    return CheckpointError(
        f"{path} ({size:,} bytes) cannot be read as a checkpoint: {type(error).__name__}: {text}",
        hint="It may be incomplete, or something else. Resume from another checkpoint.",
    )


def _turn(leaf: Pending | Tensor) -> tuple[int, int]:
    """Other ranks send their tensors in the order of their numbers."""
    return (leaf.rank, leaf.number) if isinstance(leaf, Pending) else (-1, 0)


class _Finder(pickle.Pickler):
    """Notes the storages in an object in the order in which torch numbers them."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=torch.serialization.DEFAULT_PROTOCOL)
        self.found: dict[int, torch.UntypedStorage] = {}

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, torch.TypedStorage):
            obj = obj._untyped_storage
        elif not torch.is_storage(obj):
            return None
        self.found.setdefault(obj._cdata, obj)
        return ""


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    finder = _Finder()
    finder.dump(tree)
    return list(finder.found.values())


class _Record(NamedTuple):
    """Where a record of the archive has its data, how many bytes, and where the directory speaks of it."""

    start: int
    size: int
    entry: int


class _Archive:
    """The records for storages of a file that ``torch.save`` has written without their data.

    Args:
        file: the file, open for reading and writing.
        path: where it will be, for messages.
    """

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._file, self._path = file, path
        self._records = dict(_records(file))
        self._checksums: dict[int, int] = {}

    def fill(self, number: int, parts: Iterable[Tensor]) -> None:
        """Write the data of a storage.

        Raises:
            CheckpointError: the data has another size, or cannot be written.
        """
        record, written, checksum = self._records[number], 0, 0
        for part in parts:
            data = part.numpy().data
            with naming(self._path, self._file.name):
                self._file.seek(record.start + written)
                self._file.write(data)
            checksum, written = zlib.crc32(data, checksum), written + len(data)
        if written != record.size:
            raise CheckpointError(f"{self._path} has room for {record.size:,} bytes, and {written:,} came.")
        self._checksums[number] = checksum

    def close(self) -> None:
        """Give the records their checksums. torch does not look at them, other tools do."""
        if get_crc32_options():
            for number, checksum in self._checksums.items():
                record, data = self._records[number], struct.pack("<I", checksum)
                self._write(record.entry + 16, data)
                if record.size:  # torch writes size and checksum behind the data as well, after a signature
                    self._write(record.start + record.size + 4, data)
        self._file.flush()

    def _write(self, position: int, data: bytes) -> None:
        self._file.seek(position)
        self._file.write(data)


def _records(file: BinaryIO) -> Iterator[tuple[int, _Record]]:
    """The records for storages, by number."""
    with zipfile.ZipFile(file) as archive:
        members, position = {info.filename: info for info in archive.infolist()}, archive.start_dir
    file.seek(position)
    directory, place = file.read(), 0
    while directory[place : place + 4] == b"PK\x01\x02":
        name_size, *others = struct.unpack_from("<HHH", directory, place + 28)
        info = members[directory[place + 46 : place + 46 + name_size].decode()]
        folder, _, number = info.filename.partition("/")[2].partition("/")
        if folder == "data" and number.isdigit():
            file.seek(info.header_offset + 26)
            sizes = struct.unpack("<HH", file.read(4))
            start = info.header_offset + 30 + sum(sizes)
            yield int(number), _Record(start, info.file_size, position + place)
        place += 46 + name_size + sum(others)
