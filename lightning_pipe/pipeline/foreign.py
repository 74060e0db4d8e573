"""Names the parameters of other ranks whose values code outside steps has tried to read."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from traceback import walk_tb
from types import FrameType, TracebackType

from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.pipeline.absent import Absent
from lightning_pipe.pipeline.cut.stage_run import StageRun
from lightning_pipe.pipeline.runner import Pipeline

_HINT = (
    "Hint: In hooks a rank has the values of its own layers alone. Read, call or generate after fit, when the module "
    "is whole again, or from a checkpoint."
)
_INDEX = re.compile(r"\[(\d+)\]")


def name_unknown_values(error: BaseException, pipeline: Pipeline) -> None:
    """Add to an error that comes of reading parameters of other ranks which they are, and what to do.

    Such parameters have no values here, and torch only says so. Their names are found in the code that failed: in its
    text, or as the values of its variables.

    Args:
        error: any error; of others nothing becomes.
        pipeline: knows who holds what.
    """
    about_values = isinstance(error, RuntimeError) and ("meta" in str(error) or isinstance(error, CutError))
    if not about_values or any(frame.f_code is StageRun.run.__code__ for frame, _ in walk_tb(error.__traceback__)):
        return
    foreign = {name: p for name, p in pipeline.module.named_parameters() if p.is_meta or isinstance(p, Absent)}
    lines = reversed(list(_frames(error.__traceback__)))
    names = next((names for frame, line in lines if (names := _mentioned(frame, line, foreign))), [])
    holders = sorted({pipeline.transport.names[rank] for name in names for rank in pipeline.owners(name)})
    where = f": {'it is' if len(names) == 1 else 'they are'} on {', '.join(holders)}" if names else ""
    what = ", ".join(map(repr, names)) or "the parameters that this comes from"
    error.add_note(f"{pipeline.transport.describe().capitalize()} does not hold {what}{where}.\n{_HINT}")


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, str]]:
    for frame, number in walk_tb(trace):
        yield frame, linecache.getline(frame.f_code.co_filename, number)


def _mentioned(frame: FrameType, line: str, foreign: dict[str, nn.Parameter]) -> list[str]:
    """The parameters that a line of code writes out, or that are its variables' or its module's."""
    dotted = _INDEX.sub(r".\1", line)
    written = [name for name in foreign if re.search(rf"\b{re.escape(name)}\b", dotted)]
    values = {id(value) for value in frame.f_locals.values()}
    if isinstance(module := frame.f_locals.get("self"), nn.Module):
        values |= {id(parameter) for parameter in module.parameters(recurse=False)}
    return written or [name for name, parameter in foreign.items() if id(parameter) in values]
