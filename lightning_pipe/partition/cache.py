"""Files for what is known of a module: its layers' costs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType

from torch import nn


def cache_path(
    module: nn.Module, also: Sequence[str], suffix: str, folder: str | os.PathLike[str] | None = None
) -> Path:
    """The file for what is known of a module: another module, other options and other code have another one.

    A module is known by its class, its modules with their options, and the names, shapes and types of its parameters.
    Where the class is imported from does not count: a script that runs and a command that imports it mean the same.

    Args:
        module: the module.
        also: what else it depends on.
        suffix: of the file.
        folder: where; by default ``$LIGHTNING_PIPE_CACHE`` or ``~/.cache/lightning_pipe``.
    """
    chosen = folder or os.environ.get("LIGHTNING_PIPE_CACHE") or Path.home() / ".cache" / "lightning_pipe"
    kinds = [f"{name} {type(part).__qualname__}({part.extra_repr()})" for name, part in module.named_modules()]
    parameters = [f"{name}{tuple(p.shape)}{p.dtype}" for name, p in module.named_parameters()]
    code = [text for kind in dict.fromkeys(map(type, module.modules())) for text in _code_of(kind)]
    description = [*also, *kinds, *parameters, *code]
    digest = hashlib.sha256("\n".join(description).encode()).hexdigest()[:16]
    return Path(chosen) / f"{type(module).__name__}-{digest}{suffix}"


def _code_of(kind: type) -> list[str]:
    """What tells that the methods of a class of the user's have been edited."""
    if kind.__module__.startswith("torch."):
        return []
    methods = [(name, value.__code__) for name, value in vars(kind).items() if isinstance(value, FunctionType)]
    return [f"{name} {code.co_code.hex()} {code.co_names}" for name, code in methods]


def write_atomically(path: Path, text: str) -> None:
    """Write a file that others read meanwhile: they find what was there before, or all of it.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
