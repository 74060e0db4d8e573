"""Skip connections between layers, past the layers between them.

A layer *stashes* a tensor under a name and a later one *pops* it; the pipeline carries it from the stage of the one to
the stage of the other, and the gradient back. Without a pipeline the same layers work in an ordinary module. Plain code
between the layers of a sequence needs none of this: what it keeps is carried by itself. The interface is torchgpipe's
(Kim et al., arXiv:2004.09910, section 3.3.1), so that networks written for it run here.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from typing_extensions import override

from lightning_pipe.errors import PipeError

Layer = TypeVar("Layer", bound="SkippableMixin")

_numbers = itertools.count()
_local = threading.local()


class SkipError(PipeError, TypeError):
    """Stashes and pops do not fit together."""


@dataclass(frozen=True, order=True)
class Namespace:
    """Keeps equal names of different layers apart; see `SkippableMixin.isolate`.

    Make namespaces where the module is made, the same ones on all ranks: they are told apart by their order.
    """

    number: int

    def __init__(self) -> None:
        object.__setattr__(self, "number", next(_numbers))


class Key(NamedTuple):
    """What a tensor is stashed under."""

    namespace: Namespace | None
    name: str


class Event(NamedTuple):
    """A tensor was stashed, or else popped."""

    key: Key
    stashes: bool


class Store(dict[Key, Tensor | None]):
    """What is stashed and not popped yet."""

    def begin(self, key: Key, tensor: Tensor | None) -> None:
        """Stash."""
        self[key] = tensor

    def end(self, key: Key) -> Tensor | None:
        """Pop."""
        return self.pop(key)


class StepStore(Store):
    """That of one step over a pipeline.

    Attributes:
        events: what was stashed and popped by layers that this process runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    @override
    def begin(self, key: Key, tensor: Tensor | None) -> None:
        if key in self:
            raise SkipError(
                f"'{key.name}' is stashed again before it was popped.",
                hint="Use another name, or a namespace of its own.",
            )
        self.events.append(Event(key, stashes=True))
        super().begin(key, tensor)

    @override
    def end(self, key: Key) -> Tensor | None:
        self.events.append(Event(key, stashes=False))
        return super().end(key)

    def check_empty(self) -> None:
        """Raise if something was stashed in vain."""
        if self:
            names = ", ".join(f"'{key.name}'" for key in self)
            raise SkipError(
                f"{names} was stashed in this step and not popped.", hint="Pop it in a later layer, or do not stash it."
            )


@dataclass(frozen=True)
class stash:  # noqa: N801 - used like a function, as in torchgpipe
    """``yield stash(name, tensor)`` in a skippable layer's forward: keep a tensor for a later layer."""

    name: str
    tensor: Tensor | None


@dataclass(frozen=True)
class pop:  # noqa: N801 - used like a function, as in torchgpipe
    """``tensor = yield pop(name)`` in a skippable layer's forward: take what an earlier layer stashed."""

    name: str


def put(name: str, tensor: Tensor | None, namespace: Namespace | None = None) -> None:
    """Stash a tensor from any layer's forward, without generators and declarations.

    Over a pipeline it goes straight to the stage that pops it, once the first batch has shown which one that is.

    Example:
        >>> import torch
        >>> put("early", torch.ones(1))
        >>> take("early")
        tensor([1.])
    """
    if tensor is not None and not isinstance(tensor, Tensor):
        raise SkipError(
            f"'{name}' is a {type(tensor).__name__}; a skip connection carries one tensor, or None.",
            hint="Stash each tensor under a name of its own.",
        )
    _store().begin(Key(namespace, name), tensor)


def take(name: str, namespace: Namespace | None = None) -> Tensor | None:
    """Pop what `put` stashed.

    Raises:
        SkipError: nothing is stashed under this name.
    """
    store = _store()
    key = Key(namespace, name)
    if key not in store:
        kept = ", ".join(repr(other.name) for other in store) or "nothing"
        raise SkipError(
            f"'{name}' was popped, but no earlier layer has stashed it in this step; there is {kept}.",
            hint="Stash it in a layer that comes first, in the same namespace.",
        )
    return store.end(key)


class stored_in:  # noqa: N801 - used like a function; a class, for speed
    """Let stashes and pops of this thread use ``store`` inside the context."""

    __slots__ = ("_before", "_store")

    def __init__(self, store: Store) -> None:
        self._store = store

    def __enter__(self) -> None:
        self._before, _local.store = _store(), self._store

    def __exit__(self, *_: object) -> None:
        _local.store = self._before


def _store() -> Store:
    if not hasattr(_local, "store"):
        _local.store = Store()
    store: Store = _local.store
    return store


class SkippableMixin(nn.Module):
    """What `skippable` adds to a layer.

    Attributes:
        stashable: the names the layer declares to stash.
        poppable: the names it declares to pop.
        namespaces: for each name its namespace; none for names that were not isolated.
    """

    stashable: frozenset[str] = frozenset()
    poppable: frozenset[str] = frozenset()

    @property
    def namespaces(self) -> Mapping[str, Namespace]:
        """The namespace of every isolated name."""
        names: Mapping[str, Namespace] = self.__dict__.get("_namespaces", {})
        return names

    def isolate(self: Layer, namespace: Namespace, *, only: Iterable[str] | None = None) -> Layer:
        """Keep this layer's names, or ``only`` some of them, apart from equal names elsewhere; returns the layer."""
        names = self.stashable | self.poppable if only is None else frozenset(only)
        unknown = names - self.stashable - self.poppable
        if unknown:
            raise SkipError(f"{type(self).__name__} neither stashes nor pops {', '.join(map(repr, sorted(unknown)))}.")
        self.__dict__["_namespaces"] = {**self.namespaces, **dict.fromkeys(names, namespace)}
        return self

    def skip_keys(self, names: Iterable[str]) -> list[Key]:
        """The names with their namespaces."""
        return [Key(self.namespaces.get(name), name) for name in sorted(names)]

    def drive(self, steps: Any) -> Any:
        """Run a forward method that yields `stash` and `pop`, and return its result."""
        if not isinstance(steps, Generator):
            done: set[str] = set()
            result = steps
        else:
            result, done = self._drive(steps)
        missing = (self.stashable | self.poppable) - done
        if missing:
            raise SkipError(
                f"{type(self).__name__} declares {', '.join(map(repr, sorted(missing)))} but did not stash or pop it.",
                hint="Every declared name must be yielded in every forward; stash(name, None) is allowed.",
            )
        return result

    def _drive(self, steps: Generator[Any, Any, Any]) -> tuple[Any, set[str]]:
        done: set[str] = set()
        answer: Any = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as end:
                return end.value, done
            answer = self._answer(request)
            done.add(request.name)

    def _answer(self, request: Any) -> Tensor | None:
        match request:
            case stash(name, tensor) if name in self.stashable:
                put(name, tensor, self.namespaces.get(name))
                return None
            case pop(name) if name in self.poppable:
                return take(name, self.namespaces.get(name))
            case stash(name) | pop(name):
                raise SkipError(
                    f"{type(self).__name__} yields '{name}' without declaring it.",
                    hint=f"Add it: @skippable({type(request).__name__}=['{name}']).",
                )
        raise SkipError(f"{type(self).__name__} yields a {type(request).__name__}; only stash and pop are understood.")


def skippable(
    stash: Iterable[str] = (),
    pop: Iterable[str] = (),
) -> Callable[[type[nn.Module]], type[Any]]:
    """Let a layer's forward yield `stash` and `pop`.

    Args:
        stash: the names it stashes.
        pop: the names it pops.

    Example:
        >>> import torch
        >>> from lightning_pipe import skip
        >>> @skip.skippable(stash=["early"])
        ... class First(nn.Module):
        ...     def forward(self, x):
        ...         yield skip.stash("early", x)
        ...         return x * 2
        >>> @skip.skippable(pop=["early"])
        ... class Last(nn.Module):
        ...     def forward(self, x):
        ...         early = yield skip.pop("early")
        ...         return x + early
        >>> nn.Sequential(First(), Last())(torch.ones(1))
        tensor([3.])
    """
    stashable, poppable = frozenset(stash), frozenset(pop)
    if not stashable | poppable:
        raise SkipError(
            "A skippable layer needs names.", hint="Use @skippable(stash=['name']) or @skippable(pop=['name'])."
        )

    def decorate(layer: type[nn.Module]) -> type[Any]:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self.drive(layer.forward(self, *args, **kwargs))

        body = {
            "__module__": layer.__module__,
            "__qualname__": layer.__qualname__,
            "__doc__": layer.__doc__,
            "forward": forward,
            "stashable": stashable,
            "poppable": poppable,
        }
        return type(layer.__name__, (layer, SkippableMixin), body)

    return decorate


def verify_skippables(module: nn.Module) -> None:
    """Check that every stash in a sequence of layers has exactly one pop behind it.

    Args:
        module: an ``nn.Sequential`` or ``nn.ModuleList``; layers may be nested.

    Raises:
        SkipError: one line for every stash without pop, pop without stash, and name used twice.
    """
    verify((name, layer) for name, layer in module.named_modules() if isinstance(layer, SkippableMixin))


def verify(layers: Iterable[tuple[str, SkippableMixin]]) -> None:
    """Check layers with their names, in the order in which they run; see `verify_skippables`."""
    problems: list[str] = []
    stashed: dict[Key, str] = {}
    popped: dict[Key, str] = {}
    for name, layer in layers:
        problems += _problems(name, layer, stashed, popped)
    for key, name in stashed.items():
        if key not in popped:
            problems.append(f"'{key.name}' is stashed by '{name}' and never popped")
    if problems:
        lines = "\n".join(f"* {problem}" for problem in problems)
        raise SkipError(
            f"Skip connections do not fit together:\n{lines}",
            hint="Use .isolate(Namespace()) for layers that use the same names twice.",
        )


def _problems(name: str, layer: SkippableMixin, stashed: dict[Key, str], popped: dict[Key, str]) -> Iterator[str]:
    """What is wrong with one layer after those before it, which are noted in ``stashed`` and ``popped``."""
    for both in sorted(layer.stashable & layer.poppable):
        yield f"'{name}' stashes and pops '{both}'"
    for key in layer.skip_keys(layer.stashable - layer.poppable):
        if key in stashed:
            yield f"'{key.name}' is stashed by '{stashed[key]}' and again by '{name}'"
        stashed[key] = name
    for key in layer.skip_keys(layer.poppable - layer.stashable):
        if key in popped:
            yield f"'{key.name}' is popped by '{popped[key]}' and again by '{name}'"
        elif key not in stashed:
            yield f"'{key.name}' is popped by '{name}' and stashed by no layer before it"
        popped[key] = name
