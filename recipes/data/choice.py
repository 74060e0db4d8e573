"""Which source of data is read, and which one "auto" means on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import lightning as L

from recipes.errors import RecipeError

log = logging.getLogger(__name__)

T = TypeVar("T")


def choose(source: str, files: str | None, name: str, default: str, stand_in: tuple[str, str]) -> str:
    """Returns the source if it is named. "auto" takes local files if given, else the hub where it answers.

    Args:
        source: "auto" or the name of a source.
        files: folder with local files.
        name: data set on the hub, or a folder.
        default: the name where none is given: only it may be replaced.
        stand_in: the source to take where neither is there, and what it is, for the log.

    Raises:
        RecipeError: the data set that was named is not there, and no other one is meant.
    """
    if source != "auto":
        return source
    if files is not None or Path(name).expanduser().is_dir():
        return "files"
    if hub_answers(name):
        return "hub"
    local, title = stand_in
    if name != default:
        raise RecipeError(
            f"data.name={name} is no folder, and the hub does not answer for it.",
            hint=f"Name local files (data.files=FOLDER), or take {title} (data.source={local}).",
        )
    log.info("The hub does not answer, so %s is replaced by %s (data.files=FOLDER names local files).", name, title)
    return local


def hub_answers(name: str, seconds: float = 3.0) -> bool:
    """Asks the hub for the data set, quickly: False without network, offline, or when it has no such data set."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(name, timeout=seconds)
    except Exception as error:  # every client and system reports "no network" in its own way
        log.debug("The hub does not answer: %s", error)
        return False
    return True


def agreed(trainer: L.Trainer | None, decide: Callable[[], T]) -> T:
    """What the first process decides, on all processes: whether the hub answers must not differ between them.

    Args:
        trainer: connects the processes; None means that there is one.
        decide: called on the first process only.
    """
    decision = decide() if trainer is None or trainer.is_global_zero else None
    return decision if trainer is None else trainer.strategy.broadcast(decision)  # type: ignore[return-value]
