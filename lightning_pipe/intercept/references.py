"""What layers compute with besides their arguments, parameters and buffers: all values that their code names.

A layer may have a configuration that the step changes, refer to its LightningModule (``self.owner = [module]``), or
read a global::

    def training_step(self, batch):         stage 0                     stage 1, the last one
        h = self.layers[0](batch)           refers to self.gain: 1.0    answers: 1.0, then 0.9
        loss = self.layers[1](h).mean()     ends at the cut
        self.gain *= 0.9                                                0.9, then 0.81

Functions that are attributes or in closures lead on, to what they name; those that are globals do not, since they may
be hooks of backward passes, which run at other times on every rank.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from lightning_pipe.intercept.kept_state import is_data, is_own
from lightning_pipe.intercept.numbers import set_attributes
from lightning_pipe.intercept.user_objects import LARGE, inside, is_users, values_in, walk

if TYPE_CHECKING:
    from lightning_pipe.intercept.layer_state import LayerState

_PLAIN = (bool, int, float, complex, str, bytes, bytearray, np.ndarray, type(None))
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
Label = tuple[str, str]
"""Where a value is: the path to a part and an attribute of it; else, in angle brackets, the place and a name there."""


class References:
    """What the code of a layer or outside module names.

    Args:
        name: the layer or outside module.
        module: the module.
        state: knows who runs other modules: the tensors of their parts belong to their stages.
        given: the leaves of what the call is given.

    Attributes:
        reached: the modules that it reaches and that are no parts of it.
        before: the numbers of the values before the call; see `Digest.referred`.
    """

    def __init__(self, name: str, module: nn.Module, state: LayerState, given: Sequence[Any] = ()) -> None:
        self._name, self._state = name, state
        self._given = [each for each in given if isinstance(each, Tensor)]
        self.before: dict[Label, int] | None = None
        self._own = {part: path for path, part in module.named_modules()}
        self._names: set[str] = set()
        self._functions: dict[types.FunctionType, None] = {}
        self._globals: dict[Label, Callable[[], Any]] = {}
        self.reached: dict[nn.Module, None] = {}
        for part in self._own:
            # other hooks are code outside layers, which all stages run
            hooks = part._forward_pre_hooks.values() if part is not module else ()
            for function in (*_methods(type(part)), *hooks):
                self._follow(function)
            for name, value in vars(part).items():
                if is_data(name):
                    self._follow(value)
        self._follow([*given])
        self._reach_by_names()

    def _follow(self, value: Any) -> None:
        """Note the modules and functions that a value leads to."""
        for found in leads_to(value):
            if isinstance(found, nn.Module):
                if found not in self._own:
                    self.reached[found] = None
            elif found not in self._functions and is_users(found):
                self._functions[found] = None
                self._names |= _names_in(found.__code__)
                for name, cell in zip(found.__code__.co_freevars, found.__closure__ or (), strict=False):
                    self._note(found, name, functools.partial(_content_of, cell))
                for name in sorted(_names_in(found.__code__) & found.__globals__.keys()):
                    self._note(found, name, functools.partial(found.__globals__.get, name))

    def _note(self, function: types.FunctionType, name: str, read: Callable[[], Any]) -> None:
        value = read()
        if is_state(value):
            self._globals[f"<{function.__module__}>", name] = read
        if not isinstance(value, types.FunctionType) or name in function.__code__.co_freevars:
            self._follow(value)

    def _reach_by_names(self) -> None:
        """Of a module that is reached, the parts and methods that are named."""
        pending = [*self.reached]
        while pending:
            each = pending.pop()
            named = [*_methods(type(each), self._names)]
            children = each._modules.items()
            named += [child for name, child in children if name in self._names or isinstance(each, _CONTAINERS)]
            before = {*self.reached}
            for value in named:
                self._follow(value)
            pending += [found for found in self.reached if found not in before]

    def values(self) -> Iterator[tuple[Label, Any]]:
        """All of these values as they are now, with where they are."""
        yield from ((label, read()) for label, read in self._globals.items())
        for number, tensor in enumerate(self._given):
            yield from ((("<given>", f"{number}.{name}"), value) for name, value in set_attributes(tensor).items())
        for part, path in self._own.items():
            yield from (((path, name), value) for name, value in self._attributes(part) if is_state(value))
            # what its class has is no attribute of the module: calls on other ranks may change that
            of_class = {name: getattr(type(part), name, None) for name in self._names if is_own(part) and is_data(name)}
            for name in sorted(name for name, value in of_class.items() if value is not None and is_state(value)):
                yield (f"<{type(part).__qualname__}>", name), of_class[name]
        for number, part in enumerate(each for each in self.reached if not self._state.same_stage(self._name, each)):
            computing = part in self._state.root_of
            tensors = {} if computing else part._buffers
            for name, value in (
                *self._attributes(part),
                *((n, each) for n, each in tensors.items() if n in self._names),
            ):
                if is_state(value) or (type(value) is Tensor and not computing):
                    yield (f"<{number}>", name), value

    def _attributes(self, part: nn.Module) -> Iterator[tuple[str, Any]]:
        """What is named of a module; deferred batch norms and metrics have some of each call."""
        if is_own(part):
            for name, value in vars(part).items():
                if name in self._names and is_data(name):
                    held = inside(value)
                    yield name, value if held is None or len(held) <= LARGE else len(held)


def is_state(value: Any) -> bool:
    """Whether a value is a number, a container or an object of the user's, which all stages have until it changes.

    Parameters each has for its own layers.
    """
    held = isinstance(value, _PLAIN) or inside(value) is not None
    return held and not any(isinstance(each, nn.Parameter) for each in values_in(value))


def leads_to(value: Any) -> Iterator[Any]:
    """The modules and functions that a value leads to; functions that of what they are bound to, too."""
    found = walk(value, lambda each: values_in(each) or bound_in(each))
    yield from (each for each in found if isinstance(each, nn.Module | types.FunctionType))


def bound_in(value: Any) -> list[Any]:
    """What a function, a method, a property or a reference holds."""
    if isinstance(value, weakref.ReferenceType):
        return [value()]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, types.FunctionType):
        return [*(value.__defaults__ or ()), *map(_content_of, value.__closure__ or ())]
    # methods, class methods and static methods
    return [found for name in ("__self__", "__func__") if (found := getattr(value, name, None)) is not None]


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _methods(kind: type, only: set[str] | None = None) -> Iterator[Any]:
    """What a class of the user's has, and those that it is derived from; ``only``: under these names.

    What builds objects does not run in a forward pass, and names all that they have.
    """
    for base in kind.__mro__:
        if is_users(base):
            named = ((name, value) for name, value in vars(base).items() if name != "__init__")
            yield from (value for name, value in named if only is None or name in only)


@cache
def _names_in(code: types.CodeType) -> frozenset[str]:
    """The names of attributes and globals in a function, and in those that it defines."""
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(code.co_names).union(*inner)
