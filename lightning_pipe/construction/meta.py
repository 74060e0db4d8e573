"""Modules on the meta device: each gives itself its values, as with Lightning's ModelParallelStrategy.

Tensors on the meta device become tensors that know how they are made. Every module that owns some initialises them, by
``reset_parameters`` or Transformers' ``_init_weights``; that is recorded for the whole module and costs no memory. Each
random operation has a seed of its own, from the run's seed and the module's name: nothing has to be drawn that nobody
needs, and values are the same for any number of stages.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from lightning_pipe.construction.context import deferred_init
from lightning_pipe.construction.deferred import is_deferred, view_of
from lightning_pipe.construction.drawing import seeded
from lightning_pipe.construction.module import without_weak_references
from lightning_pipe.construction.tape import Cell
from lightning_pipe.construction.unset import is_unset, was_meta, without_value

RESETS = ("reset_parameters", "_reset_parameters")
"""What modules call the method that initialises them; the second one is ``nn.MultiheadAttention``'s."""


def place_meta(module: nn.Module) -> None:
    """Let the tensors that a module has on the meta device wait for their values."""
    cells: dict[int, Cell] = {}
    tensors = {id(tensor): tensor for tensor in _tensors(module) if tensor.is_meta}
    with without_weak_references(module):
        for tensor in tensors.values():
            torch.utils.swap_tensors(tensor, without_value(tensor, cells))  # type: ignore[no-untyped-call]


def initialise_meta(module: nn.Module, seed: int) -> None:
    """Record the values of the tensors that a module had on the meta device, and that nothing has given any yet.

    Args:
        module: the module.
        seed: of the run, the same on all ranks.
    """
    place_meta(module)
    ways, loaded = _ways(module), _set_already(_tensors(module))
    # children first: what a module does to its children's tensors comes after what they do themselves
    for name, part in _children_first("", module, set()):
        tied, unset = _set_already(_own(part)), any(map(is_unset, _own(part)))
        for initialise in ways(name, part, unset):
            with deferred_init(), seeded(zlib.crc32(name.encode()) + (seed << 32)), torch.no_grad():
                initialise()
            if not any(map(is_unset, _own(part))):
                break
        _forget_later_writes(tied)
    _forget_later_writes(loaded)


def _set_already(tensors: Iterable[Tensor]) -> list[tuple[Cell, int]]:
    """The cells that have got their values, from a checkpoint or another module, with the number of writes of each."""
    cells = dict.fromkeys(view_of(tensor).cell for tensor in tensors if is_deferred(tensor) and not is_unset(tensor))
    return [(cell, len(cell.writes)) for cell in cells if was_meta(cell)]


def _forget_later_writes(cells: Iterable[tuple[Cell, int]]) -> None:
    for cell, number in cells:
        del cell.writes[number:]


def _children_first(name: str, part: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if part not in seen:
        seen.add(part)
        for path, child in part.named_children():
            yield from _children_first(f"{name}.{path}" if name else path, child, seen)
        yield name, part


def _own(part: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers that are attributes of a module itself."""
    yield from part.parameters(recurse=False)
    yield from part.buffers(recurse=False)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return (tensor for part in module.modules() for tensor in _own(part))


def _ways(module: nn.Module) -> Callable[[str, nn.Module, bool], Iterator[Callable[[], object]]]:
    """How a part of a module initialises itself: by its name, itself, and whether tensors of its own have no value."""
    transformers = sys.modules.get("transformers.modeling_utils")
    models = {
        name: part
        for name, part in module.named_modules()
        if transformers is not None and isinstance(part, transformers.PreTrainedModel)
    }
    whole = {part for model in models.values() for part in model.modules() if _all_were_meta(part)}

    def of_part(name: str, part: nn.Module, unset: bool) -> Iterator[Callable[[], object]]:
        if unset or part in whole:  # a model may scale weights when it comes to the module around them
            around = [each for each in models if not each or f"{name}.".startswith(f"{each}.")]
            if around:
                initialise = models[max(around, key=len)]._init_weights
                yield lambda: initialise(part)
        for attribute in RESETS if unset else ():
            if callable(reset := getattr(part, attribute, None)):
                yield reset

    return of_part


def _all_were_meta(part: nn.Module) -> bool:
    tensors = list(_tensors(part))
    return bool(tensors) and all(is_deferred(tensor) and was_meta(view_of(tensor).cell) for tensor in tensors)
