"""Tensors in files: of those that a constructor opens, only what somebody needs is ever read.

While a module is built without memory, ``torch.load`` and ``safetensors.safe_open`` give out tensors that know where
they lie. What a loader does with them is recorded like all else: conversions of the dtype, pieces that are joined or
split, copies into parameters. ``from_pretrained`` and ``load_from_checkpoint`` run unchanged.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.construction.deferred import THREAD, backed, numbers
from lightning_pipe.construction.tape import SMALL, Cell, Operation
from lightning_pipe.patches import replaced

_FORGET = 4
"""``MADV_DONTNEED`` of Linux: pages are read from the file again when they are needed, and changes are lost."""
_PAGE_OUT = 21
"""``MADV_PAGEOUT`` of Linux, which loses nothing, and leaves in memory what other processes have mapped as well."""

_PIECE = 16 << 20
"""Bytes that are copied at a time."""

_FORMATS = ("pt", "torch", "pytorch")


@contextmanager
def files_unread() -> Iterator[None]:
    """While the context lasts, what this thread opens within `deferred_init` is read when it is needed."""
    with ExitStack() as stack:
        stack.enter_context(replaced(torch, "load", functools.partial(_load, torch.load)))
        try:
            import safetensors  # it need not be installed
        except ImportError:
            pass
        else:
            opened = functools.partial(_open, safetensors.safe_open)
            for module in _having("safe_open", safetensors.safe_open):
                stack.enter_context(replaced(module, "safe_open", opened))
        yield


def _having(name: str, value: Any) -> list[ModuleType]:
    """The modules that have imported something under its own name."""
    return [module for module in list(sys.modules.values()) if getattr(module, "__dict__", {}).get(name) is value]


# ---------------------------------------------------------------------- torch's own files


def _load(load: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``torch.load``: to the CPU, where modules are built, unless the caller names another device."""
    path = _path_of(f)
    elsewhere = isinstance(map_location, str | torch.device | dict) and str(map_location) != "cpu"
    whole = path is None or kwargs.get("mmap") is False or not zipfile.is_zipfile(path)
    if not THREAD.building or elsewhere or whole:
        return load(f, map_location, *args, **kwargs)
    kwargs["mmap"] = True
    return unread(load(path, "cpu", *args, **kwargs))


def _path_of(file: Any) -> str | None:
    """The local file that is to be read from its beginning; ``None``: it is something else."""
    if isinstance(file, str | os.PathLike):
        return os.fspath(file)
    name = getattr(file, "name", None)
    return name if isinstance(name, str) and os.path.isfile(name) and file.tell() == 0 else None


def unread(tree: Any) -> Any:
    """Replace the tensors in dictionaries, lists and tuples, which lie in files mapped by torch, by unread ones."""
    cells: dict[int, Cell] = {}

    def walk(value: Any) -> Any:
        if type(value) in (Tensor, nn.Parameter):
            return _in_mapped_file(value, cells)
        if isinstance(value, dict):
            for key in value:  # in place: state dicts have attributes of their own
                value[key] = walk(value[key])
        elif isinstance(value, list):
            value[:] = map(walk, value)
        elif type(value) is tuple:
            return tuple(map(walk, value))
        return value

    return walk(tree)


def _in_mapped_file(tensor: Tensor, cells: dict[int, Cell]) -> Tensor:
    storage = tensor.untyped_storage()
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or storage.nbytes() <= SMALL:
        return tensor
    cell = cells.get(storage._cdata)
    if cell is None:
        cell = cells[storage._cdata] = _cell(_taken_out, storage)
    made: Tensor = backed(tensor.detach(), cell)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _cell(read: Callable[..., Tensor], *args: Any) -> Cell:
    """A cell whose bytes come from a file."""
    cell = Cell()
    cell.writes.append(Operation(next(numbers), read, args, {}, reads=(), made=(cell,), strides=((1,),)))
    return cell


def _taken_out(mapped: torch.UntypedStorage) -> Tensor:
    """The bytes of a part of a mapped file."""
    return read_out(torch.empty(0, dtype=torch.uint8).set_(mapped))


def read_out(mapped: Tensor) -> Tensor:
    """A copy of a tensor in a mapped file, whose pages no longer count as this process's afterwards.

    It is copied in pieces, so that no more than one piece is in memory twice.
    """
    if sys.platform != "linux" or mapped.device.type != "cpu" or not mapped.is_contiguous():
        return mapped.clone()
    copied = torch.empty_like(mapped)
    for target, source in zip(_pieces(copied), _pieces(mapped), strict=True):
        target.copy_(source)
        _let_go(source)
    return copied


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """The memory of a contiguous tensor, as bytes."""
    start = tensor.storage_offset() * tensor.element_size()
    memory: Any = torch.empty(0, dtype=torch.uint8)
    pieces: Sequence[Tensor] = memory.set_(tensor.untyped_storage(), start, (tensor.nbytes,)).split(_PIECE)
    return pieces


def _let_go(mapped: Tensor) -> None:
    """Take the pages of a mapped file that lie wholly in this piece out of this process's memory."""
    start = mapped.data_ptr()
    first, end = -(-start // mmap.PAGESIZE), (start + mapped.nbytes) // mmap.PAGESIZE
    if first < end:
        advice = _FORGET if _unchanged(first, end) else _PAGE_OUT
        size = (end - first) * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t(size), advice)


def _unchanged(first: int, end: int) -> bool:
    """Whether none of these pages of a private mapping has been written to: a changed page belongs to no file."""
    try:
        with open("/proc/self/pagemap", "rb") as pagemap:
            pagemap.seek(first * 8)
            entries = torch.frombuffer(bytearray(pagemap.read((end - first) * 8)), dtype=torch.int64)
    except OSError:
        return False
    swapped, present, of_file = entries & 1 << 62 != 0, entries < 0, entries & 1 << 61 != 0
    return len(entries) == end - first and not bool((swapped | (present & ~of_file)).any())


# ---------------------------------------------------------------------- safetensors


def _open(safe_open: Callable[..., Any], filename: Any, framework: str, *args: Any, **kwargs: Any) -> Any:
    opened = safe_open(filename, framework, *args, **kwargs)
    if not THREAD.building or framework not in _FORMATS:
        return opened
    return _Safetensors(opened, functools.partial(safe_open, os.fspath(filename), framework))


def safetensors_file(path: os.PathLike[str]) -> Any:
    """A file of safetensors whose tensors are read when they are needed."""
    from safetensors import safe_open

    again = functools.partial(safe_open, os.fspath(path), "pt")
    opened: Any = again()
    return opened if isinstance(opened, _Safetensors) else _Safetensors(opened, again)


class _Safetensors:
    """An open file of safetensors whose tensors are read when they are needed.

    Args:
        opened: the file.
        again: opens it again: tensors refer to the mapped file, which is to go as soon as they are read.
    """

    def __init__(self, opened: Any, again: Callable[[], Any]) -> None:
        self._opened, self._again = opened, again

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __enter__(self) -> _Safetensors:
        self._opened.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._opened.__exit__(*error)

    def get_tensor(self, name: str) -> Tensor:
        """A tensor by name."""
        mapped: Tensor = self._opened.get_tensor(name)  # without a look at its pages
        if mapped.device.type != "cpu" or mapped.nbytes <= SMALL:
            return mapped
        return backed(mapped, _cell(_read, self._again, name))

    def get_tensors(self) -> dict[str, Tensor]:
        """All tensors."""
        return {name: self.get_tensor(name) for name in self._opened.offset_keys()}

    def get_slice(self, name: str) -> _Slice:
        """A tensor by name, of which a part can be taken."""
        return _Slice(self._opened.get_slice(name), functools.partial(self.get_tensor, name))


class _Slice:
    """A tensor in a file of which a part can be taken."""

    def __init__(self, part: Any, whole: Callable[[], Tensor]) -> None:
        self._part, self._whole = part, whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self._whole()[index]


def _read(again: Callable[[], Any], name: str) -> Tensor:
    """The bytes of a tensor."""
    with again() as file:
        tensor: Tensor = file.get_tensor(name)
        return read_out(tensor).reshape(-1).view(torch.uint8)


def unread_tensor(like: Tensor, read: Callable[[Tensor], object]) -> Tensor:
    """Stand for a tensor that lies elsewhere.

    Args:
        like: one of its shape and dtype, without memory.
        read: puts the value into a tensor.
    """
    like = like.contiguous()
    return backed(like, _cell(_bytes, read, tuple(like.shape), like.dtype), torch.device("cpu"))


def _bytes(read: Callable[[Tensor], object], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    value = torch.empty(shape, dtype=dtype)
    read(value)
    return value.reshape(-1).view(torch.uint8)
