"""Private names of libraries: looked for once, when the register that lists them is imported.

A private name may go in any release. Without a look at the start its absence would show as an ``AttributeError`` in the
middle of a training, or not at all: an attribute that nobody reads any more can still be set.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from importlib import metadata
from types import CodeType
from typing import Any

from lightning_pipe.errors import VersionError

Names = Mapping[str, Mapping[str, str]]
"""Private names with the reason for their use, by owner: a module, or a class with its module before it."""


def check(libraries: Mapping[str, str], names: Names) -> None:
    """Look for private names.

    Args:
        libraries: the versions of each library with which the names were seen.
        names: those that are used.

    Raises:
        VersionError: one is missing.
    """
    missing = [f"{owner}.{name}" for owner, its in names.items() for name in its if not exists(owner, name)]
    if missing:
        installed = ", ".join(f"{name} {_version(name)}" for name in libraries)
        seen = " and ".join(f"{name}{versions}" for name, versions in libraries.items())
        raise VersionError(
            f"lightning-pipe uses {', '.join(missing)}, which {installed} lacks.",
            hint=f"Install {seen}: with these versions lightning-pipe was tried.",
        )


def exists(owner: str, name: str) -> bool:
    """Whether a module or class has a name, or objects of the class get it from one of its functions."""
    found = _find(owner)
    if found is None:
        return False
    if hasattr(found, name):
        return True
    return isinstance(found, type) and any(name in code.co_names for code in _code_of(found))


def _find(owner: str) -> Any | None:
    """The module or class of this name."""
    parts = owner.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part, None)
        return found
    return None


def _code_of(kind: type) -> Iterator[CodeType]:
    """The code of the methods of a class, with the functions inside them."""
    attributes = [value for each in kind.__mro__ for value in vars(each).values()]
    getters = [value.fget for value in attributes if isinstance(value, property)]
    functions = map(inspect.unwrap, filter(callable, [*attributes, *getters]))
    waiting = [function.__code__ for function in functions if inspect.isfunction(function)]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "(not installed)"
