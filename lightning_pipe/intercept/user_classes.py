"""Tells classes of the user's from those of libraries."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from functools import cache
from typing import Any


def is_users(kind: Any) -> bool:
    """Whether a class, or a function, is the user's own rather than a library's, which may be large and intricate."""
    return _is_users(str(kind.__module__))


@cache
def _is_users(name: str) -> bool:
    if name == "__main__":
        return True
    if name.partition(".")[0] == __name__.partition(".")[0]:
        return False  # what this package puts into modules while it runs, wherever it is installed
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None:
        found = importlib.util.find_spec(name) if module is None else None
        file = found.origin if found else None
    # A package installed with ``pip install -e`` lies outside these folders and counts as the user's.
    libraries = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    return file is not None and not any(file.startswith(path) for path in libraries)
