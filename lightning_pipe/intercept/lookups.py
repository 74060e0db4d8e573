"""Tells of look-ups of attributes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from lightning_pipe.patches import replaced
from lightning_pipe.torch_internals import never_compile


def reads_told(kind: Any, told: Callable[[Any, str], None]) -> AbstractContextManager[None]:
    """While the context lasts, somebody is told of each attribute of a class's objects before it is looked up.

    Look-ups of compiled code are not told.

    Args:
        kind: the class, because Python looks for ``__getattribute__`` nowhere else.
        told: gets the object and the name.
    """
    original: Any = kind.__getattribute__
    is_objects, compiling = original is object.__getattribute__, torch.compiler.is_dynamo_compiling

    def lookup(held: Any, name: str) -> Any:
        if compiling():
            # Dynamo would take object's own look-up, called as a function, for this one, and never end
            return super(kind, held).__getattribute__(name) if is_objects else original(held, name)
        told(held, name)
        return original(held, name)

    never_compile(lookup)
    return replaced(kind, "__getattribute__", lookup, gated=False)
