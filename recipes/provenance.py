"""Which code a run was made with, and on which machine."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from pathlib import Path


def commit(folder: Path = Path(__file__).parent) -> str:
    """The commit that a folder's code is at, and whether files differ from it; "unknown" outside a git repository.

    Args:
        folder: any in the repository.
    """
    try:
        name = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{name} with changes" if changed else name


def machine() -> str:
    """Date, machine and versions."""
    import torch

    return (
        f"{date.today().isoformat()}; {os.cpu_count()} cores {platform.machine()}; Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()
