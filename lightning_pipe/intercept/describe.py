"""Describes what a call leaves behind, for the stages that skip it, and stands for it there.

Distributions of `torch.distributions` are what they hold, their parameters among it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, ExpTransform, Transform

from lightning_pipe.intercept.call_record import AS_THEY_ARE, LEAF, PLAIN, Same, Unseen, Value
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.torch_internals import register_pytree_node, tree_flatten

_INVERSE = type(ExpTransform().inv)


def described(
    result: Any, given: Sequence[Any], device: torch.device | None = None
) -> tuple[Any, tuple[Any, ...], list[Tensor]]:
    """Structure and leaves of a `CallRecord`, and the tensors in them that are no arguments, each once.

    Args:
        result: what a call leaves behind. What no message can hold is `Unseen` among the leaves.
        given: the leaves of its arguments. Of an object that is given twice the first position counts.
        device: tensors on another kind of device than this one say so.
    """
    leaves, structure = ([result], LEAF) if type(result) is Tensor else tree_flatten(result)
    positions = {id(each): position for position, each in reversed([*enumerate(given)])}
    found, new = list[Any](), list[Tensor]()
    for position, leaf in enumerate(leaves, start=len(given)):
        if leaf is None or isinstance(leaf, PLAIN):
            found.append(leaf if isinstance(leaf, AS_THEY_ARE) else Value.of(leaf))
        elif (at := positions.setdefault(id(leaf), position)) != position:
            found.append(Same(at))
        elif isinstance(leaf, Tensor):
            found.append(TensorSpec.of(leaf, None if device in (None, leaf.device) else leaf.device.type))
            new.append(leaf)
        else:
            found.append(Unseen(type(leaf).__qualname__))
    return structure, tuple(found), new


def stand_ins(
    leaves: Sequence[Any], given: Sequence[Any], device: torch.device, known: Iterable[Tensor | None] = ()
) -> list[Any]:
    """What stands for described leaves, on a stage that does not make the call.

    Args:
        leaves: the leaves of the record.
        given: the leaves of the arguments here.
        device: of the placeholders.
        known: of the tensors that are no arguments, those that are there already.
    """
    found, there = [*given], iter(known)
    for leaf in leaves:
        if isinstance(leaf, TensorSpec):
            tensor = next(there, None)
            found.append(Placeholder(leaf, device) if tensor is None else tensor)
        elif isinstance(leaf, Same):
            found.append(found[leaf.at])
        else:
            found.append(leaf.value if isinstance(leaf, Value) else leaf)
    return found[len(given) :]


def show_distributions() -> None:
    """Make every class of distributions and of their transforms known as a container, the user's own too."""
    kinds: list[Any] = [Distribution, Transform]
    for kind in kinds:
        kinds += kind.__subclasses__()
        with suppress(ValueError):  # it is known
            register_pytree_node(kind, _contents, partial(_made_of, kind))


def _contents(held: Any) -> tuple[list[Any], tuple[tuple[str, bool], ...]]:
    # a transform keeps the inverse that it has made, which refers to it
    values = {**vars(held), "_inv": None} if "_inv" in vars(held) and type(held) is not _INVERSE else vars(held)
    # torch takes sizes apart, and makes plain tuples of them
    return [*values.values()], tuple((name, type(each) is torch.Size) for name, each in values.items())


def _made_of(kind: Any, values: Iterable[Any], names: tuple[tuple[str, bool], ...]) -> Any:
    made = object.__new__(kind)
    for (name, is_size), value in zip(names, values, strict=True):
        vars(made)[name] = torch.Size(value) if is_size else value
    return made
