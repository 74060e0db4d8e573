"""Which checkpoint is meant by "last", "best" or a path."""

from __future__ import annotations

from os.path import getmtime
from pathlib import Path

from recipes.errors import RecipeError

LAST = "last"


def in_run(run: Path, which: str) -> Path:
    """A checkpoint of one run.

    Args:
        run: its output folder.
        which: "last", "best", or the path of a file.
    """
    if which not in ("last", "best"):
        if not Path(which).exists():
            raise RecipeError(
                f"There is no checkpoint {which}.", hint='Name a file of an earlier run, "last" or "best".'
            )
        return Path(which)
    found = [path for path in _saved(run) if path.name.startswith(LAST) == (which == "last")]
    if not found:
        raise RecipeError(f"{run} has no {which} checkpoint.", hint="Was the run broken off before its first one?")
    return found[-1]


def to_resume(which: str | None, output: Path) -> str | None:
    """The checkpoint that a new run starts from.

    Args:
        which: None, a path, or "last" or "best" of the newest run beside the new one that has one.
        output: the new run's folder.
    """
    if which is None:
        return None
    if which not in ("last", "best"):
        return str(in_run(output, which))
    others = [run for run in output.resolve().parent.glob("*") if run != output.resolve()]
    runs = [run for run in others if _saved(run)]
    if not runs:
        raise RecipeError(
            f"There is no earlier run with a checkpoint beside {output}.", hint="Name its file: ckpt_path=PATH."
        )
    return str(in_run(max(runs, key=lambda run: getmtime(_saved(run)[-1])), which))


def _saved(run: Path) -> list[Path]:
    """A run's checkpoints, the newest last; a second run in the same folder adds "last-v1.ckpt"."""
    return sorted((run / "checkpoints").glob("*.ckpt"), key=getmtime)
