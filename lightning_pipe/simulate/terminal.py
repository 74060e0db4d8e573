"""Timelines as text."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_pipe.simulate.style import label, row_names, stages_of, summary, time_of

if TYPE_CHECKING:
    from lightning_pipe.schedules.action import Kind
    from lightning_pipe.simulate.timeline import Event, Timeline

_WIDE = 200
_MOST_BLOCKS = 24


def draw(timeline: Timeline, width: int | None = None) -> str:
    """One line per rank, time to the right; each action is labelled with its kind and micro-batch.

    A timeline that is too long for the width goes on in further blocks of lines. Where that would take more than
    24 of them, it is drawn in one block, whose short actions have their kind alone.

    Args:
        timeline: the timeline.
        width: columns to use at most; by default the terminal's, or 200 where there is none.
    """
    names = row_names(timeline)
    margin = max(map(len, names)) + 2
    available = max(20, (width or shutil.get_terminal_size((_WIDE, 24)).columns) - margin - 1)
    with_stage = any(len(stages) > 1 for stages in stages_of(timeline))
    labels = {
        event: label(event, with_stage=with_stage)
        for row in timeline.compute
        for event in row
        if event.end > event.start
    }
    scale, columns = _scale(timeline, labels, available)
    rows = [_row([event for event in row if event in labels], labels, scale) for row in timeline.compute]
    lines = [summary(timeline)]
    for start in range(0, max([1, *map(len, rows)]), columns):
        if start:
            lines.append(f"{'':<{margin}}time {time_of(start / scale, timeline.unit)}:")
        lines += [
            (f"{name:<{margin}}" + row[start : start + columns]).rstrip() for name, row in zip(names, rows, strict=True)
        ]
    peaks = " ".join(map(str, timeline.peak_activations))
    lines.append(f"makespan {time_of(float(timeline.makespan), timeline.unit)}, activations held, row by row: {peaks}")
    return "\n".join(lines)


def _scale(timeline: Timeline, labels: dict[Event, str], available: int) -> tuple[float, int]:
    """Columns per unit of time, as many as the shortest action's label needs, and columns of a block."""
    if not labels:
        return 0.0, available
    unit = float(min(event.end - event.start for event in labels))
    wanted = max(map(len, labels.values())) + 1
    # Whole actions in a block, where all are multiples of the shortest: no label is torn.
    block = max(available // wanted, 1) * wanted
    if wanted * float(timeline.makespan) / unit <= _MOST_BLOCKS * block:
        return wanted / unit, block
    most = available * unit / float(timeline.makespan)
    # Whole columns where possible: equal actions then have equal cells.
    return (int(most) or most) / unit, available


def _row(row: Sequence[Event], labels: dict[Event, str], scale: float) -> str:
    text = ""
    for event in row:
        start, end = (max(len(text), round(float(time) * scale)) for time in (event.start, event.end))
        text = (text.ljust(start) + _cell(labels[event], event.kind, end - start)).ljust(end)
    return text


def _cell(text: str, kind: Kind, width: int) -> str:
    """``F3`` and a line to the end of the action but for a free column; the kind alone where that is too long."""
    if width > len(text):
        return text + "─" * (width - len(text) - 1)
    return kind[0] + "─" * (width - 2) if width > 1 else kind[0] * width
