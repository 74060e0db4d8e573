"""Tensors that were on the meta device, and have no value until something gives them one."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.construction.deferred import Deferred, is_deferred, numbers, view_of
from lightning_pipe.construction.tape import Cell, Operation, View, views_in
from lightning_pipe.errors import CutError

_SHOWN = 5
"""Names that an error lists."""


def without_value(tensor: Tensor, cells: dict[int, Cell]) -> Deferred:
    """Stand for a tensor on the meta device; those that share memory share a cell."""
    storage = tensor.untyped_storage()
    cell = cells.get(storage._cdata)
    if cell is None:
        cell = cells[storage._cdata] = Cell(storage.nbytes())
        args = (storage.nbytes(), tensor.dtype)
        cell.writes.append(Operation(next(numbers), _unset, args, {}, reads=(), made=(cell,), strides=((1,),)))
    where = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, torch.device("cpu"))
    made = Deferred.at(View(cell, *where), tensor.detach())
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)  # type: ignore[assignment]
    vars(made).update(vars(tensor))
    return made


def _unset(size: int, dtype: torch.dtype) -> Tensor:
    """Memory that something will fill; not a number until then."""
    value = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((size // dtype.itemsize,), value, dtype=dtype)


def was_meta(cell: Cell) -> bool:
    """Whether a cell was on the meta device."""
    return bool(cell.writes) and cell.writes[0].function is _unset


def is_unset(tensor: Tensor) -> bool:
    """Whether a tensor was on the meta device, and nothing has given it all of its values."""
    if not is_deferred(tensor):
        return tensor.is_meta
    cell = view_of(tensor).cell
    if not was_meta(cell):
        return False
    writes = cell.writes[1:]
    return not any(operation.overwrites(cell) for operation in writes) and not _cover(writes, view_of(tensor))


def _cover(writes: Sequence[Operation], whole: View) -> bool:
    """Whether operations have together written to every value of a tensor."""
    if not (writes and whole.cell.size):
        return not whole.cell.size
    # pages of its own: what the allocator gets back between other objects would stay with the process
    memory = mmap.mmap(-1, whole.cell.size // whole.dtype.itemsize, mmap.MAP_PRIVATE)
    seen = torch.frombuffer(memory, dtype=torch.bool)
    for operation in writes:
        for view in _written(operation):
            if view.cell is whole.cell:
                seen.as_strided(view.shape, view.strides, view.offset).fill_(True)
    return bool(seen.as_strided(whole.shape, whole.strides, whole.offset).all())


def _written(operation: Operation) -> Iterator[View]:
    """What an operation writes to."""
    function: Any = operation.function
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = operation.args[place] if place < len(operation.args) else operation.kwargs.get(argument.name)
            yield from views_in(value)


def check_all_set(module: nn.Module) -> None:
    """Look for tensors that nothing has initialised.

    Raises:
        CutError: there are some.
    """
    names = [
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name, tensor in (*part.named_parameters("", False), *part.named_buffers("", False), *_attributes(part))
        if is_unset(tensor)
    ]
    if names:
        shown = ", ".join(map(repr, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} others" * (len(names) > _SHOWN))
        raise CutError(
            f"nothing initialises {shown}, made on the meta device.",
            hint="Give the module that owns it a method reset_parameters(), pass a checkpoint that holds it "
            "(trainer.fit(…, ckpt_path=…)), or build it in `with lightning_pipe.deferred_init():`.",
        )


def _attributes(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, value) for name, value in vars(part).items() if isinstance(value, Tensor))
