"""Random numbers of tensors without memory: drawn once when an operation is recorded, and given back."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.construction.tape import DRAWING, View, compute, is_view
from lightning_pipe.tensor_spec import numbered
from lightning_pipe.torch_internals import tree_leaves, tree_map

SCRATCH: dict[torch.device, torch.UntypedStorage] = {}
"""Memory that random numbers are drawn into which nobody needs yet; emptied at the end of a construction."""


class _Seeds(threading.local):
    """The seeds of the operations that a thread records next; ``None``: they draw from the generators there are."""

    next: Iterator[int] | None = None


_SEEDS = _Seeds()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """While the context lasts, random numbers depend on a seed alone, and other code's do not on what happens here.

    Operations that are recorded have seeds of their own: nothing has to be drawn to know what the next one draws.
    """
    state = torch.get_rng_state()
    source = random.Random(seed)
    _SEEDS.next = iter(lambda: source.getrandbits(63), None)
    torch.default_generator.manual_seed(source.getrandbits(63))
    try:
        yield
    finally:
        _SEEDS.next = None
        torch.set_rng_state(state)


def draw(func: Any, args: Any, kwargs: Any, device: torch.device) -> tuple[torch.Generator, Tensor] | None:
    """Draw what a random operation draws: generators move on as without a tape.

    Args:
        func: the operator.
        args: its arguments, as an `Operation` has them.
        kwargs: likewise.
        device: where it is to run.

    Returns:
        The generator and its state before; ``None`` for an operation that draws nothing.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    leaves = tree_leaves((args, kwargs), is_leaf=is_view)
    generator = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
    if generator is None:
        if _SEEDS.next is not None:
            return _default_generator(device), torch.Generator(device).manual_seed(next(_SEEDS.next)).get_state()
        generator = _default_generator(device)
    state = generator.get_state()
    free = func.overloadpacket.__name__ in DRAWING
    memory = {} if free else compute(leaf.cell for leaf in leaves if isinstance(leaf, View))

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, View):
            return leaf
        return _scratch(leaf) if free else leaf.over(memory[leaf.cell])

    drawn_args, drawn_kwargs = tree_map(value, (args, kwargs), is_leaf=is_view)
    with torch.no_grad():
        func(*drawn_args, **drawn_kwargs)
    return generator, state


def _scratch(view: View) -> Tensor:
    """Memory to draw into. One piece serves all: many would leave holes that the allocator does not give back."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
    need = reach * view.dtype.itemsize
    kept = SCRATCH.get(view.device)
    if kept is None or kept.nbytes() < need:
        kept = SCRATCH[view.device] = torch.UntypedStorage(need, device=view.device)  # type: ignore[no-untyped-call]
    return view._replace(offset=0).over(kept)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[numbered(device).index]
    return torch.default_generator
