"""What is replaced in torch, in Lightning and in the user's objects for a time: all of it by `replaced`.

Code may keep what it finds while something is replaced: a module that is imported during ``fit`` and takes a function
out of torch, a signal handler that is registered. So a function is put in behind a *gate*, which leads to the
replacement as long as one is in force and to the original afterwards. The gate of a function of a module or class is
the same in every run: who has kept it in the first one follows the second one too.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any

_MISSING = object()
# The attributes belong to the process, and threads can be ranks of their own.
_lock = threading.RLock()


def replaced(owner: Any, name: str, value: Any, *, gated: bool = True) -> AbstractContextManager[None]:
    """While the context lasts, an attribute has another value.

    Contexts may overlap in any order, in several threads too: the one that was entered last counts, and the last one to
    end puts back what was there before the first.

    Args:
        owner: a module, a class or an object; an object's attribute is set on it alone, past ``__setattr__``.
        name: the attribute.
        value: stands there meanwhile.
        gated: whether a function is put in behind a gate. Not so for one that calls what it found in the attribute
            (that may be the gate, which leads back to it), where the call must cost nothing more, and for one that
            others may pickle.
    """
    return _Replacement(owner, name, value, gated)


@contextmanager
def all_replaced(places: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Several of `replaced` at once, without gates: owners, names and values.

    For what is replaced in every batch: an `ExitStack` costs more than the replacements do.
    """
    entered: list[_Replacement] = []
    try:
        for owner, name, value in places:
            replacement = _Replacement(owner, name, value, gated=False)
            replacement.__enter__()
            entered.append(replacement)
        yield
    finally:
        for replacement in reversed(entered):
            replacement.__exit__()


def replacements() -> list[tuple[Any, str]]:
    """What is replaced now: owners and names."""
    with _lock:
        return [(place.owner, place.name) for place in _places.values()]


class _Gate:
    """Stands in the place of a function, and leads to what replaces it now."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = self.leads_to = original
        self._open: list[Callable[..., Any]] = []

        @functools.wraps(original)
        def gate(*args: Any, **kwargs: Any) -> Any:
            return self.leads_to(*args, **kwargs)

        self.function = gate

    def open(self, function: Callable[..., Any]) -> None:
        """Lead to this one from now on."""
        self._open.append(function)
        self.leads_to = function

    def close(self, function: Callable[..., Any]) -> None:
        """This one is no longer in force."""
        del self._open[next(i for i, each in enumerate(self._open) if each is function)]
        self.leads_to = self._open[-1] if self._open else self.original


_gates: dict[int, _Gate] = {}
"""The gates of functions of modules and classes, by ``id`` of the gate and of the function, which the gate keeps."""


class _Place:
    """An attribute that is replaced: what was there before, and what is to stand there, the latest last."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.before = vars(owner).get(name, _MISSING)
        self.entered: list[_Replacement] = []
        self._gate: _Gate | None = None

    def gate(self) -> _Gate:
        """The gate before the function that was there."""
        lasting = isinstance(self.owner, (type, ModuleType))
        if self._gate is None:
            original = self.before if lasting and self.before is not _MISSING else getattr(self.owner, self.name)
            self._gate = _gates.get(id(original)) or _Gate(original)
            if lasting:
                _gates[id(self._gate.function)] = _gates[id(self._gate.original)] = self._gate
        return self._gate

    def put(self, value: Any) -> None:
        """Let the attribute be this."""
        if isinstance(self.owner, type):
            if value is _MISSING:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, value)
        elif value is _MISSING:
            vars(self.owner).pop(self.name, None)
        else:
            vars(self.owner)[self.name] = value


_places: dict[tuple[int, str], _Place] = {}


class _Replacement:
    """The context of `replaced`. A class, for speed: the layers of a module are replaced in every batch."""

    __slots__ = ("_function", "_gate", "_name", "_owner", "value")

    def __init__(self, owner: Any, name: str, value: Any, gated: bool) -> None:
        self._owner, self._name, self.value = owner, name, value
        self._function = value if gated and callable(value) and not isinstance(value, type) else None
        self._gate: _Gate | None = None

    def __enter__(self) -> None:
        key = id(self._owner), self._name
        with _lock:
            place = _places.get(key)
            if place is None:
                place = _places[key] = _Place(self._owner, self._name)
            if self._function is not None:
                self._gate = place.gate()
                self._gate.open(self._function)
                self.value = self._gate.function
            place.entered.append(self)
            place.put(self.value)

    def __exit__(self, *_: object) -> None:
        key = id(self._owner), self._name
        with _lock:
            place = _places[key]
            if self._gate is not None and self._function is not None:
                self._gate.close(self._function)
            place.entered.remove(self)
            if place.entered:
                place.put(place.entered[-1].value)
            else:
                del _places[key]
                place.put(place.before)


@contextmanager
def unheard(message: str) -> Iterator[None]:
    """While the context lasts, warnings that match ``message`` are not shown; the filters are as before afterwards."""
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", message=message)
    added = warnings.filters[0]
    try:
        yield
    finally:
        if added not in before and added in warnings.filters:
            warnings.filters.remove(added)  # type: ignore[attr-defined]


def after_closure(args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[], None]) -> tuple[Any, Any] | None:
    """For hooks before a step: do something once the gradients are there, after its closure if it has one.

    Args:
        args: of the step, with the optimizer.
        kwargs: of the step.
        then: what is to be done; each time if the step calls its closure several times.

    Returns:
        Other arguments for the step.
    """

    def around(closure: Callable[[], Any]) -> Callable[[], Any]:
        def own() -> Any:
            result = closure()
            then()
            return result

        return own

    optimizer, *rest = args
    if rest and callable(rest[0]):
        return (optimizer, around(rest[0]), *rest[1:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": around(kwargs["closure"])}
    then()
    return None


def around_steps(trainer: Any, before: Callable[..., Any], after: Callable[..., Any]) -> ExitStack:
    """Hooks around the steps of a Trainer's optimizers, also of one that user code puts in the place of another.

    Args:
        trainer: the Trainer.
        before: as for ``Optimizer.register_step_pre_hook``.
        after: as for ``Optimizer.register_step_post_hook``.

    Returns:
        Removes them when it is closed.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    def of_trainer(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda optimizer, *args: hook(optimizer, *args) if optimizer in trainer.optimizers else None

    hooks = ExitStack()
    hooks.callback(register_optimizer_step_pre_hook(of_trainer(before)).remove)
    hooks.callback(register_optimizer_step_post_hook(of_trainer(after)).remove)
    return hooks
