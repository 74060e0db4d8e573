"""Tracebacks of errors in the user's code, without this package's frames."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from types import TracebackType

from lightning_pipe.errors import PipeError

SHOW = "LIGHTNING_PIPE_FULL_TRACEBACK"
"""The environment variable that leaves tracebacks as they are."""

_OURS = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib"))


def hide_own(error: BaseException) -> None:
    """Take this package's frames out of a traceback, and out of those of its causes.

    An error keeps these frames if it is no `PipeError` and no code of the user was running inside the package's.
    """
    if os.environ.get(SHOW):
        return
    hidden, seen, pending = 0, set[int](), [error]
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        pending += [cause for cause in (each.__cause__, each.__context__) if cause is not None]
        frames = _frames(each.__traceback__)
        kept = [frame for frame in frames if not _is_own(frame)]
        if len(kept) < len(frames) and (isinstance(each, PipeError) or _runs_users_code(frames)):
            each.__traceback__ = _joined(kept)
            hidden += len(frames) - len(kept)
    if hidden:
        error.add_note(f"({hidden} frames of lightning_pipe are hidden; set {SHOW}=1 to see them.)")


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


def _is_own(frame: TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(_OURS)


def _runs_users_code(frames: list[TracebackType]) -> bool:
    """Whether code of the user's runs inside of the package's."""
    first = next(position for position, frame in enumerate(frames) if _is_own(frame))
    return any(
        not _is_own(frame) and not frame.tb_frame.f_code.co_filename.startswith((*_INSTALLED, "<"))
        for frame in frames[first:]
    )


def _joined(frames: list[TracebackType]) -> TracebackType | None:
    following: TracebackType | None = None
    for frame in reversed(frames):
        following = TracebackType(following, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return following
