"""Configuration schemas out of signatures: every argument of what is configured is a key, and no other.

A configuration file names what it configures in its defaults list. `/arguments/torch.optim.AdamW@_here_` becomes a node
with a key for each argument, its type and its default; `/factory/…` is the same for what the recipe completes later.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import field, make_dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.utils import get_object
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import override

ARGUMENTS, FACTORY = "arguments", "factory"
PRIMITIVES = (bool, int, float, str, Path, bytes)

# Arguments that the recipe gives itself, and what chooses them instead.
TAKEN = {
    "lightning.Trainer": {"strategy": "pipe=…", "callbacks": "callbacks=…", "logger": "logger=…"},
    "lightning_pipe.PipeStrategy": {
        "accelerator": "trainer.accelerator=…",
        "parallel_devices": "trainer.devices=…",
        "cluster_environment": "trainer.plugins=[…]",
        "checkpoint_io": "trainer.plugins=[…]",
        "precision_plugin": "trainer.precision=…",
    },
}


def taken(target: str) -> dict[str, str]:
    """The arguments that are no keys, each with what chooses it.

    Args:
        target: what is configured, such as "lightning.Trainer".
    """
    return TAKEN.get(target, {})


@functools.cache
def signature(target: str) -> Mapping[str, inspect.Parameter]:
    """All arguments; where an annotation cannot be evaluated, as one that is imported for type checkers alone, any."""
    made = get_object(target)
    try:
        return inspect.signature(made, eval_str=True).parameters
    except (NameError, AttributeError, SyntaxError):
        return {name: one.replace(annotation=Any) for name, one in inspect.signature(made).parameters.items()}


def parameters(target: str, *, partial: bool = False) -> dict[str, inspect.Parameter]:
    """The arguments that are keys.

    Args:
        target: what is configured.
        partial: what calls it later gives the arguments that have no default.
    """
    return {
        one.name: one
        for one in signature(target).values()
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        and one.name not in taken(target)
        and not (partial and one.default is one.empty)
    }


def takes_any(target: str) -> bool:
    """Whether any name may be a key, because the target takes ``**kwargs``."""
    return any(one.kind is one.VAR_KEYWORD for one in signature(target).values())


def words(hint: Any) -> tuple[str, ...] | None:
    """The only strings that an argument may be; ``None`` where others may be meant too.

    Example:
        >>> words(Literal["b", "d"] | int), words(str)
        (('b', 'd'), None)
    """
    members = _members(hint)
    found = tuple(word for one in members if typing.get_origin(one) is Literal for word in typing.get_args(one))
    free = any(one is Any or one is str or one is Path for one in members)
    return None if free or not found else tuple(word for word in found if isinstance(word, str))


def _members(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [member for one in typing.get_args(hint) for member in _members(one)]
    return [hint]


@functools.cache
def schema(target: str, *, partial: bool = False) -> Any:
    """A dataclass with a key for every argument; a node that others can be added to (``+key=…``) for what takes any.

    Args:
        target: what is configured, such as "torch.optim.AdamW".
        partial: it is completed later: a node that Hydra makes a `functools.partial` of.
    """
    found = parameters(target, partial=partial)
    own: dict[str, Any] = {"_target_": target} | ({"_partial_": True} if partial else {})
    values = {name: MISSING if one.default is one.empty else plain(one.default) for name, one in found.items()}
    if takes_any(target):
        return OmegaConf.create(own | values)
    listed = [(name, Any, field(default=value)) for name, value in own.items()]
    return make_dataclass(target.rpartition(".")[2], [*listed, *(_key(found[name], values[name]) for name in found)])


def _key(argument: inspect.Parameter, default: Any) -> tuple[str, Any, Any]:
    """The field of an argument, of its type where OmegaConf has that in a configuration, else of any."""
    key = argument.name, argument.annotation, field(default_factory=lambda: default)
    try:
        OmegaConf.structured(make_dataclass("Key", [key]))
    except OmegaConfBaseException:
        return argument.name, Any, key[2]
    return key


def plain(value: Any) -> Any:
    """A default as a configuration has it.

    Example:
        >>> plain((0.9, 0.99)), plain(timedelta(minutes=2))
        ([0.9, 0.99], {'_target_': 'datetime.timedelta', 'seconds': 120.0})

    Raises:
        TypeError: there are no words for it.
    """
    if value is None or isinstance(value, (*PRIMITIVES, Enum)):
        return value
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, timedelta):
        return {"_target_": "datetime.timedelta", "seconds": value.total_seconds()}
    raise TypeError(f"A configuration cannot express the default {value!r}.")


class Signatures(ConfigSource):
    """Where Hydra finds `arguments/<dotted name>` and `factory/<dotted name>`: it imports what a command uses alone."""

    @staticmethod
    @override
    def scheme() -> str:
        return "signatures"

    @override
    def load_config(self, config_path: str) -> ConfigResult:
        group, _, target = config_path.removesuffix(".yaml").partition("/")
        made = schema(target, partial=group == FACTORY)
        node = copy.deepcopy(made) if OmegaConf.is_config(made) else OmegaConf.structured(made)
        return ConfigResult("signatures", config_path, node, {"package": None}, is_schema_source=True)

    @override
    def available(self) -> bool:
        return True

    @override
    def is_group(self, config_path: str) -> bool:
        return config_path in (ARGUMENTS, FACTORY)

    @override
    def is_config(self, config_path: str) -> bool:
        group, _, target = config_path.removesuffix(".yaml").partition("/")
        return group in (ARGUMENTS, FACTORY) and "." in target

    @override
    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


class SignaturesPath(SearchPathPlugin):
    """Lets Hydra look there."""

    @override
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("recipes", "signatures://")


def register() -> None:
    """Makes the schemas known to Hydra; may be called again."""
    known = Plugins.instance()
    for plugin in (Signatures, SignaturesPath):
        if plugin not in known.discover(plugin.__bases__[0]):
            known.register(plugin)
