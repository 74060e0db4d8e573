"""Tensors without memory that remember how they were made."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.construction.assignments import DATA, Assignments
from lightning_pipe.construction.drawing import draw
from lightning_pipe.construction.operators import UNPREDICTABLE, device_of, recordable, settled, written_by
from lightning_pipe.construction.tape import SMALL, Cell, Operation, View, compute, views_in
from lightning_pipe.torch_internals import DisableTorchFunctionSubclass, tree_leaves, tree_map

numbers = itertools.count()
"""The order of all operations."""
_AT = "_deferred_view"
_META = "_deferred_meta"
_ALIVE = "_deferred_alive"


class _Thread(threading.local):
    """Whether a thread builds a module."""

    building = False


THREAD = _Thread()


class Deferred(Tensor):
    """A tensor whose value is computed when it is needed.

    It answers for shape, strides, dtype and device. Operations on it are recorded while a module is built; once its
    value exists, they are carried out on it.
    """

    @classmethod
    def at(cls, view: View, meta: Tensor) -> Deferred:
        """A tensor that lies in a cell, with its twin on the meta device."""
        made: Deferred = Tensor._make_wrapper_subclass(
            cls,
            view.shape,
            strides=view.strides,
            storage_offset=view.offset,
            dtype=view.dtype,
            layout=torch.strided,
            device=view.device,
            requires_grad=False,
        )
        vars(made).update({_AT: view, _META: meta, _ALIVE: ASSIGNMENTS.watch()})
        view.cell.users.add(vars(made)[_ALIVE])
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        special = _SPECIAL.get(func)
        with DisableTorchFunctionSubclass():
            if special is not None and isinstance(args[0], Deferred):
                return special(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return call(func, args, kwargs or {}, building=False)


def is_deferred(tensor: Any) -> bool:
    """Whether a tensor has no memory yet."""
    return isinstance(tensor, Deferred) and view_of(tensor).cell.memory is None


def view_of(tensor: Tensor) -> View:
    """Where a deferred tensor lies."""
    return vars(tensor)[_AT]  # type: ignore[no-any-return]


def memory_key(tensor: Tensor) -> Any:
    """The same for tensors that share memory, or will."""
    memory = tensor.untyped_storage() if not isinstance(tensor, Deferred) else view_of(tensor).cell.memory
    return view_of(tensor).cell if memory is None else memory._cdata


def real(tensor: Tensor) -> Tensor:
    """The value of a tensor, in memory that it keeps from now on."""
    if not isinstance(tensor, Deferred):
        return tensor
    view = view_of(tensor)
    if view.cell.memory is None:
        provide([view.cell])
    assert view.cell.memory is not None
    return view.over(view.cell.memory)


def provide(cells: Sequence[Cell]) -> None:
    """Give cells their memory and value."""
    for cell, memory in compute(cells).items():
        cell.memory = memory


# ---------------------------------------------------------------------- calls


def call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, building: bool) -> Any:
    """An operation on deferred tensors, or one that may make some.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
        building: whether a module is being built: what comes out may be deferred.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    waiting = [tensor for tensor in tensors if is_deferred(tensor)]
    if torch.Tag.inplace_view in func.tags and any(isinstance(tensor, Deferred) for tensor in tensors):
        return _placed_anew(func, args, kwargs)
    if not waiting and not building:
        return _carry_out(func, args, kwargs)
    return _record_if_possible(func, args, kwargs, tensors, waiting, building=building)


def _record_if_possible(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[Tensor],
    waiting: Sequence[Tensor],
    *,
    building: bool,
) -> Any:
    """Note an operation, or carry it out."""
    written = written_by(func, args, kwargs)
    others = [tensor for tensor in tensors if not is_deferred(tensor)]
    if any(not is_deferred(tensor) for tensor in written) or not recordable(
        func, kwargs, tensors, others, building=building
    ):
        return _carry_out(func, args, kwargs, keep=not building and func.overloadpacket is not torch.ops.aten.copy_)
    try:
        predicted = _predict(func, args, kwargs)
    except UNPREDICTABLE:
        return _carry_out(func, args, kwargs, keep=not building)
    outcome = tree_leaves(predicted)
    if not outcome or not all(isinstance(leaf, Tensor) for leaf in outcome):
        return _carry_out(func, args, kwargs, keep=not building)
    if not waiting and sum(leaf.nbytes for leaf in outcome) <= SMALL:
        return func(*args, **kwargs)
    return _record(func, args, kwargs, tensors, written, predicted)


def _predict(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operation on the meta device."""

    def twin(leaf: Any) -> Any:
        if isinstance(leaf, Deferred):
            return vars(leaf)[_META]
        if isinstance(leaf, Tensor):
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return None if isinstance(leaf, torch.Generator) else leaf

    meta_args, meta_kwargs = tree_map(twin, (tuple(args), dict(kwargs)))
    if any(argument.name == "device" for argument in func._schema.arguments):
        meta_kwargs["device"] = torch.device("meta")
        meta_kwargs.pop("pin_memory", None)
    return func(*meta_args, **meta_kwargs)


def _record(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[Tensor],
    written: Sequence[Tensor],
    predicted: Any,
) -> Any:
    """Note an operation, and make the tensors that stand for its results."""
    device = device_of(kwargs, tensors)
    outcome = [leaf for leaf in tree_leaves(predicted) if isinstance(leaf, Tensor)]
    if not tensors:
        kwargs = settled(func, kwargs, outcome[0].dtype, device)
    by_storage = {
        vars(tensor)[_META].untyped_storage()._cdata: view_of(tensor).cell for tensor in tensors if is_deferred(tensor)
    }
    cells = [by_storage.get(leaf.untyped_storage()._cdata) for leaf in outcome]
    noted_args, noted_kwargs = tree_map(_noted, (tuple(args), kwargs))
    reads = dict.fromkeys(view.cell for view in views_in((noted_args, noted_kwargs)))
    operation = Operation(
        number=next(numbers),
        function=func,
        args=noted_args,
        kwargs=noted_kwargs,
        reads=tuple(reads),
        made=tuple(
            Cell(leaf.untyped_storage().nbytes()) if cell is None else None
            for leaf, cell in zip(outcome, cells, strict=True)
        ),
        strides=tuple(leaf.stride() for leaf in outcome),
        generator=draw(func, noted_args, noted_kwargs, device),
    )
    # results of one call may share a new storage
    fresh: dict[int, Cell] = {}
    made: list[Cell | None] = []
    for leaf, cell, new in zip(outcome, cells, operation.made, strict=True):
        key = leaf.untyped_storage()._cdata
        if cell is None and new is not None and key not in fresh:
            fresh[key] = new
            new.writes.append(operation)
            made.append(new)
        else:
            made.append(None)
    operation.made = tuple(made)
    for cell in dict.fromkeys(view_of(tensor).cell for tensor in written if isinstance(tensor, Deferred)):
        cell.writes.append(operation)
    own = {id(vars(tensor)[_META]): tensor for tensor in tensors if isinstance(tensor, Deferred)}

    def wrapped(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in own:
            return own[id(leaf)]
        key = leaf.untyped_storage()._cdata
        cell = by_storage.get(key) or fresh[key]
        view = View(cell, tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset()), leaf.dtype, device)
        return Deferred.at(view, leaf)

    return tree_map(wrapped, predicted)


def _noted(leaf: Any) -> Any:
    if is_deferred(leaf):
        return view_of(leaf)
    return real(leaf).detach().clone() if isinstance(leaf, Tensor) else leaf  # others may change it before it is read


def _carry_out(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, keep: bool = True) -> Any:
    """Run an operation on values.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
        keep: whether the values that are computed for it stay: code that computes with a module wants them again. What
            it writes to stays in any case.
    """
    leaves = tree_leaves((args, kwargs))
    cells = list(dict.fromkeys(view_of(leaf).cell for leaf in leaves if is_deferred(leaf)))
    memory = {}
    if keep:
        provide(cells)
    else:
        provide([view_of(leaf).cell for leaf in written_by(func, args, kwargs) if is_deferred(leaf)])
        memory = compute(cells)
    own: dict[int, Tensor] = {}

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, Deferred):
            return leaf
        view = view_of(leaf)
        made = view.over(memory[view.cell] if view.cell.memory is None else view.cell.memory)
        own[id(made)] = leaf
        return made

    real_args, real_kwargs = tree_map(value, (tuple(args), dict(kwargs)))
    result = func(*real_args, **real_kwargs)
    return tree_map(lambda leaf: own.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf, result)


def _placed_anew(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation after which a tensor has another place or shape: ``set_``, ``resize_``, ``t_`` and their kin."""
    tensor, *others = args
    if not isinstance(tensor, Deferred):
        return _carry_out(func, args, kwargs)
    if func is torch.ops.aten.set_.source_Tensor:
        _set_data(tensor, others[0])
        return tensor
    value = real(tensor)
    func(value, *(real(other) if isinstance(other, Tensor) else other for other in others), **kwargs)
    _set_data(tensor, value)
    return tensor


# ---------------------------------------------------------------------- what does not come as an operation


def _set_data(tensor: Deferred, value: Tensor) -> None:
    """``tensor.data = value``."""
    if not isinstance(value, Deferred):
        value = backed(value)
    DATA.__set__(tensor, value.detach())
    vars(tensor).update({_AT: view_of(value), _META: vars(value)[_META]})
    view_of(value).cell.users.add(vars(tensor)[_ALIVE])


def _assigned(tensor: Tensor, value: Any) -> Any:
    """What ``tensor.data = value`` assigns: an ordinary tensor gets memory."""
    return value if isinstance(tensor, Deferred) else real(value)


ASSIGNMENTS = Assignments(_assigned)


def backed(value: Tensor, cell: Cell | None = None, device: torch.device | None = None) -> Deferred:
    """A deferred tensor over memory that there is, or over a cell that will have as much."""
    size = value.untyped_storage().nbytes()
    if cell is None:
        cell = Cell(memory=value.untyped_storage())
    cell.size = size
    meta = torch.empty(0, dtype=value.dtype, device="meta").set_(
        torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage(),
        value.storage_offset(),
        value.shape,
        value.stride(),
    )
    where = (tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype, device or value.device)
    return Deferred.at(View(cell, *where), meta)


def _copy(tensor: Deferred, memo: dict[int, Any]) -> Tensor:
    """``copy.deepcopy``."""
    if id(tensor) in memo:
        return memo[id(tensor)]  # type: ignore[no-any-return]
    made: Tensor = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    else:
        made.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = made
    vars(made).update({name: copy.deepcopy(value, memo) for name, value in attributes_of(tensor)})
    return made


def attributes_of(tensor: Tensor) -> Iterator[tuple[str, Any]]:
    """What others have attached to a tensor."""
    own = (_AT, _META, _ALIVE, "_is_param") if isinstance(tensor, Deferred) else ()
    return ((name, value) for name, value in vars(tensor).items() if name not in own)


def _reduce(tensor: Deferred, protocol: int) -> Any:
    """Pickling writes the value."""
    return real_like(tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def real_like(tensor: Deferred) -> Tensor:
    """An ordinary tensor, or parameter, over the same memory with the same attributes."""
    value = real(tensor)
    made = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    if not isinstance(made, nn.Parameter):
        made.requires_grad_(tensor.requires_grad)
    vars(made).update(attributes_of(tensor))
    return made


def _text(tensor: Deferred, **_: Any) -> str:
    return f"Deferred(shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device='{tensor.device}')"


def _by_value(name: str) -> Callable[..., Any]:
    return lambda tensor, *args, **kwargs: getattr(real(tensor), name)(*args, **kwargs)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((DATA.__get__, ASSIGNMENTS.property.__get__), torch.Tensor.detach),
    **dict.fromkeys((DATA.__set__, ASSIGNMENTS.property.__set__), _set_data),
    torch.Tensor.__deepcopy__: _copy,
    torch.Tensor.__reduce_ex__: _reduce,
    torch.Tensor.__repr__: _text,
    **{
        getattr(torch.Tensor, name): _by_value(name)
        for name in ("numpy", "__array__", "data_ptr", "untyped_storage", "storage", "tolist", "share_memory_")
        if hasattr(torch.Tensor, name)
    },
}
