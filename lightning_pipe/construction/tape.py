"""The operations that made tensors which have no memory yet, and how their values are computed from them.

The unit is the *cell*: what a storage is for ordinary tensors. Views of one tensor share its cell, and operations in
place write to it. The value of a cell is that of all operations that wrote to it, in order, each on what its other
inputs held at that time::

    operation          writes   reads
    0  empty            a                      the value of b: 1, 2 and 4, and with 4 the value that a had then: 0, 3
    1  empty            b                      the value of a: 0, 3 and 5
    2  normal_          b        b
    3  uniform_         a        a
    4  copy_            b        a
    5  mul_             a        a

Random operations draw their numbers when they are recorded, into memory that is given back at once: generators move on
as without a tape. An operation keeps the state that its generator had, and draws the same numbers again from it.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipe.errors import CutError
from lightning_pipe.torch_internals import disable_current_modes, tree_leaves, tree_map


@dataclass(eq=False)
class Cell:
    """What a storage will be.

    Args:
        size: its bytes.
        writes: the operations that write to it, in order.
        memory: the storage, once it exists; from then on operations are no longer recorded but carried out.
        users: what belongs to the recorded tensors that lie in it, and ends with them.
    """

    size: int = 0
    writes: list[Operation] = field(default_factory=list)
    memory: torch.UntypedStorage | None = None
    users: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)


class View(NamedTuple):
    """A tensor over a cell."""

    cell: Cell
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    def is_whole(self) -> bool:
        """Whether it reaches every byte of its cell."""
        span = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size != 1:
                if stride != span:
                    return False
                span *= size
        return self.offset == 0 and span * self.dtype.itemsize == self.cell.size

    def over(self, memory: torch.UntypedStorage) -> Tensor:
        """The tensor, over a storage."""
        with disable_current_modes():
            empty = torch.empty(0, dtype=self.dtype, device=self.device)
            return empty.set_(memory, self.offset, self.shape, self.strides)


DRAWING = frozenset({"uniform_", "normal_", "exponential_", "random_", "geometric_", "cauchy_", "log_normal_"})
"""Random operations in place whose draws do not depend on what the tensor held, only on its shape and strides."""

OVERWRITING = DRAWING | {"copy_", "zero_", "fill_"}
"""Operations in place whose outcome does not depend on what the tensor held."""

SMALL = 16 * 1024
"""Tensors of at most so many bytes are made at once: layer norms, biases, sizes, indices."""


@dataclass(eq=False)
class Operation:
    """One call of torch that was recorded.

    Args:
        number: its place in the order of all operations.
        function: the operator.
        args: its arguments, with a `View` in the place of each tensor that has no memory, and copies of the others.
        kwargs: likewise.
        reads: the cells that it reads.
        made: the cell of each tensor that it returns, ``None`` for those that are views of other cells.
        strides: the strides of each tensor that it returns.
        generator: the generator that it draws from, and the state of it; ``None``: it draws nothing.
    """

    number: int
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    reads: tuple[Cell, ...]
    made: tuple[Cell | None, ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()
    generator: tuple[torch.Generator, Tensor] | None = None

    def overwrites(self, cell: Cell) -> bool:
        """Whether a cell's value is this operation's alone, whatever it held before."""
        target, *others = self.args or (None,)
        name = getattr(getattr(self.function, "overloadpacket", None), "__name__", "")
        if not isinstance(target, View) or target.cell is not cell or name not in OVERWRITING:
            return False
        read = (view.cell for view in views_in((others, self.kwargs)))
        return cell not in read and target.is_whole()

    def run(self, memory: dict[Cell, torch.UntypedStorage]) -> None:
        """Carry it out.

        Args:
            memory: what the cells hold; cells that the operation makes are added.

        Raises:
            CutError: the result has another layout than was predicted.
        """
        args, kwargs = tree_map(lambda leaf: _real(leaf, memory), (self.args, self.kwargs), is_leaf=is_view)
        with drawing_again(self.generator):
            result = self.function(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for cell, strides, tensor in zip(self.made, self.strides, tensors, strict=True):
            if cell is None:
                continue
            memory[cell] = self._laid_out(tensor, strides, cell).untyped_storage()

    def _laid_out(self, tensor: Tensor, strides: tuple[int, ...], cell: Cell) -> Tensor:
        """A result as it was predicted: operations that were recorded since count on that.

        Meta kernels may predict another layout (``aten._linalg_svd`` on a CPU, torch 2.13).
        """
        if tensor.stride() == strides:
            return tensor
        if tensor.nbytes != cell.size:  # not alone in its storage
            raise CutError(
                f"{self.function} returned strides {tensor.stride()}, not {strides} as torch had predicted.",
                hint="Build the module outside deferred_init().",
            )
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class drawing_again:  # noqa: N801 - used like a function
    """Around an operation: its generator is in the state that it had, and afterwards in its present one again."""

    def __init__(self, generator: tuple[torch.Generator, Tensor] | None) -> None:
        self._generator = generator

    def __enter__(self) -> None:
        if self._generator is not None:
            generator, state = self._generator
            self._now = generator.get_state()
            generator.set_state(state)

    def __exit__(self, *_: object) -> None:
        if self._generator is not None:
            self._generator[0].set_state(self._now)


def compute(cells: Iterable[Cell]) -> dict[Cell, torch.UntypedStorage]:
    """The values of cells; those that have memory are left out.

    Memory of other cells that they are computed from is given back as soon as it is read for the last time.
    """
    wanted = {cell for cell in cells if cell.memory is None}
    operations = _needed(wanted)
    last: dict[Cell, int] = {}
    for place, operation in enumerate(operations):
        for cell in (*operation.reads, *(cell for cell in operation.made if cell is not None)):
            last[cell] = place
    ends: dict[int, list[Cell]] = {}
    for cell, place in last.items():
        if cell not in wanted:
            ends.setdefault(place, []).append(cell)
    memory: dict[Cell, torch.UntypedStorage] = {}
    with torch.no_grad(), disable_current_modes():
        for place, operation in enumerate(operations):
            operation.run(memory)
            for cell in ends.get(place, ()):
                memory.pop(cell, None)
    return {cell: memory[cell] for cell in wanted}


def _needed(cells: Iterable[Cell]) -> Sequence[Operation]:
    """The operations that the values of cells come from, in order.

    Of a cell that is overwritten as a whole, what came before is left out but for the operation that makes it.
    """
    found: set[Operation] = set()
    waiting: list[tuple[Cell, float]] = [(cell, float("inf")) for cell in cells]
    while waiting:
        cell, before = waiting.pop()
        end = bisect_left(cell.writes, before, key=lambda operation: operation.number)
        place = end - 1
        # those before one that is found have been looked at with it
        while place >= 0 and cell.writes[place] not in found:
            operation = cell.writes[place]
            found.add(operation)
            waiting += [(other, operation.number) for other in operation.reads if other is not cell]
            place = 0 if place > 0 and operation.overwrites(cell) else place - 1
    return sorted(found, key=lambda operation: operation.number)


def views_in(tree: Any) -> list[View]:
    """The deferred tensors among the arguments of an operation."""
    return [leaf for leaf in tree_leaves(tree, is_leaf=is_view) if isinstance(leaf, View)]


def is_view(leaf: Any) -> bool:
    """Whether a leaf of recorded arguments stands for a tensor without memory."""
    return isinstance(leaf, View)


def _real(leaf: Any, memory: dict[Cell, torch.UntypedStorage]) -> Any:
    # what it held then, even if it has memory by now that others change
    return leaf.over(memory[leaf.cell]) if isinstance(leaf, View) else leaf
