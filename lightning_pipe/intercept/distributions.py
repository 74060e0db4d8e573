"""Lets distributions of `torch.distributions` cross cuts: they are what they hold, their parameters among it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.distributions import Distribution, ExpTransform, Transform

from lightning_pipe.intercept.call_record import Shape
from lightning_pipe.torch_internals import register_pytree_node

_INVERSE = type(ExpTransform().inv)


def show_distributions() -> None:
    """Make every class of distributions and of their transforms known as a container, the user's own too."""
    kinds: list[Any] = [Distribution, Transform]
    for kind in kinds:
        kinds += kind.__subclasses__()
        with suppress(ValueError):  # it is known
            register_pytree_node(kind, _contents, partial(_made_of, kind))


def _contents(held: Any) -> tuple[list[Any], tuple[str, ...]]:
    # a transform keeps the inverse that it has made, which refers to it
    values = {**vars(held), "_inv": None} if "_inv" in vars(held) and type(held) is not _INVERSE else vars(held)
    return [Shape(each) if type(each) is torch.Size else each for each in values.values()], tuple(values)


def _made_of(kind: Any, values: Iterable[Any], names: tuple[str, ...]) -> Any:
    made = object.__new__(kind)
    contents = (torch.Size(each) if type(each) is Shape else each for each in values)
    vars(made).update(zip(names, contents, strict=True))
    return made
