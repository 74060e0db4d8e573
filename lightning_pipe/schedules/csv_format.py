"""Schedules as CSV files, in the format of torch.distributed.pipelining's compute-only schedules."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.action import COMPUTE, Action, joint_name
from lightning_pipe.schedules.family import schedule_of
from lightning_pipe.schedules.ir import Schedule

_CELL = re.compile(r"(\d+)([A-Z]+)(\d+)(?:@(\d+))?")
_INSERTED = re.compile(r"\d+(?:(?:UN|RE)SHARD|REDUCE_GRAD|(?:SEND|RECV)_[FB]\d+)")
"""What torch's files may have besides; here messages and reductions follow from the order of the rest."""
_BLOCK = re.compile(r"\(([^;]*;.*)\)([A-Z_]+)")
_KINDS = {kind.value: kind for kind in COMPUTE}


def write_csv(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Write a schedule to a file; see :meth:`Schedule.to_csv`."""
    schedule.to_csv(path)


def read_csv(path: str | PathLike[str], name: str | None = None) -> Schedule:
    """Read a schedule that :meth:`Schedule.to_csv` or torch wrote; cells that are no computation are skipped.

    Args:
        path: the file.
        name: the schedule's name; by default the file's.

    Raises:
        ScheduleError: there is no such file, a cell cannot be read, or the schedule cannot run.
    """
    orders = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            for number, row in enumerate(csv.reader(file), start=1):
                if row:  # an empty line is no rank: one with nothing to do cannot be in a schedule
                    orders.append(parse_row(row, where=f"{path}, row {number}"))
    except (OSError, ValueError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is no text in UTF-8 ({error})"
        raise ScheduleError(f"The schedule file {path} cannot be read: {reason}.") from error
    schedule = schedule_of(name or Path(path).stem, orders)
    schedule.validate()
    return schedule


def parse_row(cells: Iterable[str], where: str = "schedule") -> list[Action]:
    """The computations of one rank; other cells are skipped, those of a cell with two are joined.

    Example:
        >>> print(*parse_row(["2F0", "", "2B0@1", "(3F1;2B0)OVERLAP_F_B"]))
        2F0 2B0@1 3F1 2B0
    """
    actions = []
    for column, cell in enumerate(map(str.strip, cells), start=1):
        if not cell or _INSERTED.fullmatch(cell):
            continue
        block = _BLOCK.fullmatch(cell)
        parts = block[1].split(";") if block else [cell]
        for place, part in enumerate(parts):
            match = _CELL.fullmatch(part.strip())
            if match is None or match[2] not in _KINDS:
                raise ScheduleError(
                    f"{where}, column {column}: {part!r} is not an action.",
                    hint=f"Write stage, kind and micro-batch, as in 2F0; kinds are {', '.join(sorted(_KINDS))}.",
                )
            stage, kind, micro_batch, pipe = match.groups()
            actions.append(Action(_KINDS[kind], int(stage), int(micro_batch), int(pipe or 0), joined=place > 0))
        if block and block[2] != (name := joint_name(actions[-len(parts) :])):
            raise ScheduleError(f"{where}, column {column}: {cell!r} joins what is called {name}.")
    return actions
