"""What a module and others hold both: a list, a dictionary, an object, or another module.

Each rank has its own copy of what two layers share, and only the layers that it runs change it there::

    self.seen = []                              rank 0: layer 0          rank 1: layer 1
    for layer in self.layers:                   appends to its copy      appends to its copy
        layer.seen = self.seen

Who else holds something is looked for when a call has changed it, so what stays as it is (a configuration) may be
shared. What a module reaches in other ways than as its own part (``self.owner = [owner]``) must not change in its call.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.kept_state import Place, content_of, is_data, is_own
from lightning_pipe.intercept.user_classes import is_users

_LARGE = 4096
"""Containers of more elements are not searched."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor, type, types.ModuleType, np.ndarray)
_HINT = (
    "Let each module keep one of its own, and join them behind the layers, or let the step pass it to the layers as an "
    "argument."
)


class Sharing:
    """Knows what of a module others hold, too.

    Args:
        module: the user's module.
        roots: the layers and outside modules.
    """

    def __init__(self, module: nn.Module, roots: Iterable[nn.Module]) -> None:
        self._module = module
        self._computing = {id(part) for root in roots for part in root.modules()}
        self._counts: dict[tuple[int, str], tuple[int, ...]] = {}
        self._parts: dict[int, set[int]] = {}

    def check(self, root: tuple[str, nn.Module], place: Place, altered: Sequence[Any], *, last: bool) -> None:
        """A call has changed something in place.

        Args:
            root: the module that has been called, with its name.
            place: where in it.
            altered: the lists, dictionaries and objects there that have changed.
            last: whether the last stage has run it: it completes the step, and may change the LightningModule's.

        Raises:
            CutError: another module holds one of them.
        """
        name, called = root
        path, attribute = place
        key = (id(called.get_submodule(path)), attribute)
        # to look is slow; as long as nobody else has taken hold of them since, nothing would be found
        counts = tuple(map(sys.getrefcount, altered))
        if self._counts.get(key) == counts:
            return
        wanted, own = {id(each) for each in altered}, {id(part) for part in called.modules()}
        for other, part in self._module.named_modules():
            if id(part) in own or (last and id(part) not in self._computing):
                continue
            for held, value in vars(part).items():
                found = next(_held(value, wanted), None) if is_data(held) else None
                if found is not None:
                    here, there = written(name, path, attribute), written(other, held)
                    raise CutError(
                        f"'{name}' changes a {type(found).__qualname__} in its forward pass that `{here}` and "
                        f"`{there}` share: stages would see different ones.",
                        hint=_HINT,
                    )
        self._counts[key] = counts

    def foreign(self, root: nn.Module) -> list[tuple[str, nn.Module]]:
        """The modules of the user's that a module may read and that are no parts of it, with their names."""
        own = {id(part) for part in root.modules()}
        held = (value for part in root.modules() for name, value in vars(part).items() if is_data(name))
        found = {id(each) for value in held for each in _modules(value)} - own
        reached: dict[int, tuple[str, nn.Module]] = {}
        for name, part in self._module.named_modules() if found else ():
            for path, inner in part.named_modules() if id(part) in found else ():
                kind: Any = type(inner)
                if is_own(kind) and id(inner) not in own:
                    reached[id(inner)] = ".".join(filter(None, (name, path))), inner
        return [*reached.values()]

    def surrounds(self, part: nn.Module, root: nn.Module) -> bool:
        """Whether ``root`` is a part of a module."""
        return any(each is root for each in part.modules())

    def has(self, root: nn.Module, part: nn.Module) -> bool:
        """Whether a module is the layer or outside module ``root``, or a part of it."""
        if part is root or id(part) in self._parts.get(id(root), ()):
            return True
        self._parts[id(root)] = {id(each) for each in root.modules()}
        return id(part) in self._parts[id(root)]

    def may_change(self, part: nn.Module, *, last: bool) -> bool:
        """Whether the call of another module may change an attribute of ``part``: the last stage completes the step."""
        return last and id(part) not in self._computing

    def name_of(self, part: nn.Module) -> str:
        """The name of a module."""
        return next((name for name, each in self._module.named_modules() if each is part), type(part).__qualname__)


def changed_elsewhere(name: str, other: str, attribute: str) -> CutError:
    """The call of a module changes an attribute of another one.

    Args:
        name: the module that is called.
        other: the other one.
        attribute: of that.
    """
    return CutError(
        f"'{name}' changes `{written(other, attribute)}` in its forward pass, which belongs to another module: other "
        "stages would not see it.",
        hint="Let the forward pass return it or keep it in its own module, and let the step do the rest behind the "
        "layers.",
    )


def written(*path: str) -> str:
    """An attribute as code writes it, by the names that lead to it; the LightningModule's own is empty."""
    return ".".join(filter(None, ("self", *path)))


def _held(value: Any, wanted: set[int]) -> Iterator[Any]:
    """What is wanted of all that a value leads to, by way of lists, dictionaries and objects of the user's."""
    pending, seen = [value], set[int]()
    while pending:
        value = pending.pop()
        if isinstance(value, _PLAIN) and not isinstance(value, np.ndarray):
            continue
        if id(value) in wanted:
            yield value
        if id(value) not in seen and not isinstance(value, nn.Module):
            seen.add(id(value))
            pending += _inside(value)


def _modules(value: Any) -> Iterator[nn.Module]:
    """The modules that a value leads to; functions lead to what they are bound to."""
    pending, seen = [value], set[int]()
    while pending:
        value = pending.pop()
        if isinstance(value, nn.Module):
            yield value
        elif not isinstance(value, _PLAIN) and id(value) not in seen:
            seen.add(id(value))
            pending += _inside(value) or _bound(value)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        return [] if len(value) > _LARGE else [*(value.values() if isinstance(value, dict) else value)]
    kind: Any = type(value)
    return [] if callable(value) or not is_users(kind) else [*content_of(value).values()]


def _bound(value: Any) -> list[Any]:
    if isinstance(value, weakref.ReferenceType):
        return [value()]
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    return []


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
