"""Layers that declare what they stash and pop, with the interface of torchgpipe."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from lightning_pipe.skip.store import Namespace, SkipError, SkipKey, put, take

Layer = TypeVar("Layer", bound="SkippableMixin")


@dataclass(frozen=True)
class stash:  # noqa: N801 - used like a function, as in torchgpipe
    """``yield stash(name, tensor)`` in a skippable layer's forward: keep a tensor for a later layer.

    Args:
        name: declared with `skippable`.
        tensor: one tensor of any shape, or ``None``.
    """

    name: str
    tensor: Tensor | None


@dataclass(frozen=True)
class pop:  # noqa: N801 - used like a function, as in torchgpipe
    """``tensor = yield pop(name)`` in a skippable layer's forward: take what an earlier layer stashed.

    Args:
        name: declared with `skippable`.
    """

    name: str


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

    def skip_keys(self, names: Iterable[str]) -> list[SkipKey]:
        """The names with their namespaces."""
        return [SkipKey(self.namespaces.get(name), name) for name in sorted(names)]

    def drive(self, steps: Any) -> Any:
        """Run a forward method that yields `stash` and `pop`, and return its result."""
        done: set[str] = set()
        result = self._drive(steps, done) if isinstance(steps, Generator) else steps
        missing = (self.stashable | self.poppable) - done
        if missing:
            raise SkipError(
                f"{type(self).__name__} declares {', '.join(map(repr, sorted(missing)))} but did not stash or pop it.",
                hint="Every declared name must be yielded in every forward; stash(name, None) is allowed.",
            )
        return result

    def _drive(self, steps: Generator[Any, Any, Any], done: set[str]) -> Any:
        answer: Any = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as end:
                return end.value
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

    Returns:
        A decorator for a class of modules.

    Raises:
        SkipError: neither stashes nor pops; and in ``forward``, a declared name is left out, or another one is used.

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
