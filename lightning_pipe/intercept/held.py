"""Lets dataclasses that layers return cross cuts: they are what their attributes hold."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

from torch import nn

from lightning_pipe.intercept.slot_items import SlotItems
from lightning_pipe.torch_internals import register_pytree_node, tree_flatten, tree_map


class Held:
    """Stands for a dataclass in a result that is taken apart. It is put together as that dataclass.

    The user's class itself is not made known to torch: as an argument of a layer, its objects stay whole, so that what
    the layer changes in them is seen.

    Args:
        shown: the dataclass.
        given: the ids of the objects that the call was given, which stay whole.
        around: the ids of the dataclasses that hold it.
    """

    def __init__(self, shown: Any, given: Container[int], around: frozenset[int] = frozenset()) -> None:
        self.shown, self.given, self.around = shown, given, around | {id(shown)}


def flattened(result: Any, given: Container[int]) -> tuple[list[Any], Any]:
    """The leaves and the structure of what a layer returns, those of dataclasses in it among them.

    Args:
        result: what it returns.
        given: the ids of the objects that the call was given: dataclasses among them are leaves.
    """
    leaves, structure = tree_flatten(result)
    # mostly there is none, and each call of a layer comes by here
    return tree_flatten(_held(result, given)) if any(map(is_shown, leaves)) else (leaves, structure)


def _held(result: Any, given: Container[int], around: frozenset[int] = frozenset()) -> Any:
    """A result with its dataclasses replaced, except those that the call was given, and those that hold themselves."""

    def replaced(leaf: Any) -> Any:
        whole = id(leaf) in given or id(leaf) in around or not is_shown(leaf)
        return leaf if whole else Held(leaf, given, around)

    return tree_map(replaced, result)


def is_shown(leaf: Any) -> bool:
    """Whether a leaf is a dataclass and nothing else: no module, list or member of an enumeration at the same time."""
    return is_dataclass(leaf) and not isinstance(leaf, type | nn.Module | Enum) and _is_plain(type(leaf))


def _is_plain(kind: type) -> bool:
    return all(base is object or base.__module__ != "builtins" for base in kind.__mro__)


def _contents(of: Held) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    values = {**getattr(of.shown, "__dict__", {}), **SlotItems(of.shown)}
    return [_held(each, of.given, of.around) for each in values.values()], (type(of.shown), tuple(values))


def _made_of(values: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    kind, names = context
    # no constructor: it may take other arguments, or change what it is given; nor a frozen class's own way to set
    made: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


register_pytree_node(Held, _contents, _made_of)
