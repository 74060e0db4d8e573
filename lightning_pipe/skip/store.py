"""What is stashed under which name and not popped yet, and the plain functions that stash and pop."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from typing_extensions import override

from lightning_pipe.errors import PipeError

_numbers = itertools.count()
_local = threading.local()


class SkipError(PipeError, TypeError):
    """Stashes and pops do not fit together."""


@dataclass(frozen=True, order=True)
class Namespace:
    """Keeps equal names of different layers apart; see `SkippableMixin.isolate`.

    Make namespaces where the module is made, the same ones on all ranks: they are told apart by their order.

    Example:
        >>> put("early", None, Namespace())  # another "early" than that of any other namespace
    """

    number: int

    def __init__(self) -> None:
        object.__setattr__(self, "number", next(_numbers))


class SkipKey(NamedTuple):
    """What a tensor is stashed under."""

    namespace: Namespace | None
    name: str


class Store(dict[SkipKey, Tensor | None]):
    """What is stashed and not popped yet."""

    def begin(self, key: SkipKey, tensor: Tensor | None) -> None:
        """Stash."""
        self[key] = tensor

    def end(self, key: SkipKey) -> Tensor | None:
        """Pop."""
        return self.pop(key)


class StepStore(Store):
    """That of one step over a pipeline.

    Attributes:
        events: what was stashed (True) and popped (False) by layers that this process runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[SkipKey, bool]] = []

    @override
    def begin(self, key: SkipKey, tensor: Tensor | None) -> None:
        if key in self:
            raise SkipError(
                f"'{key.name}' is stashed again before it was popped.",
                hint="Use another name, or a namespace of its own.",
            )
        self.events.append((key, True))
        super().begin(key, tensor)

    @override
    def end(self, key: SkipKey) -> Tensor | None:
        self.events.append((key, False))
        return super().end(key)

    def check_empty(self) -> None:
        """Raise if something was stashed in vain."""
        if self:
            names = ", ".join(f"'{key.name}'" for key in self)
            raise SkipError(
                f"{names} was stashed in this step and not popped.", hint="Pop it in a later layer, or do not stash it."
            )


def put(name: str, tensor: Tensor | None, namespace: Namespace | None = None) -> None:
    """Stash a tensor from any layer's forward, without generators and declarations.

    Over a pipeline it goes from stage to stage; what layers declare (`skippable`) goes straight to its pop.

    Args:
        name: what `take` asks for.
        tensor: one tensor of any shape, or ``None``.
        namespace: keeps equal names apart.

    Raises:
        SkipError: it is no tensor, or the name is stashed already in this step over a pipeline.

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
    _store().begin(SkipKey(namespace, name), tensor)


def take(name: str, namespace: Namespace | None = None) -> Tensor | None:
    """Pop what `put` stashed.

    Args:
        name: what it was stashed under.
        namespace: the namespace that it was stashed with.

    Returns:
        The tensor, with its gradient's way back to where it was stashed; ``None`` if that was stashed.

    Raises:
        SkipError: nothing is stashed under this name.
    """
    store = _store()
    key = SkipKey(namespace, name)
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
