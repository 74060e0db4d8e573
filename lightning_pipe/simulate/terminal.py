"""Timelines as text."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from lightning_pipe.schedules.ir import Kind
from lightning_pipe.simulate.style import label, stages_of, summary, time_of
from lightning_pipe.simulate.timeline import Event, Timeline

_BACKGROUND = {
    Kind.FORWARD: 117,
    Kind.BACKWARD: 214,
    Kind.BACKWARD_INPUT: 214,
    Kind.BACKWARD_WEIGHT: 79,
    Kind.RECOMPUTE: 228,
    Kind.STEP: 176,
}
_WIDE = 200


def draw(timeline: Timeline, *, colour: bool = False, width: int | None = None) -> str:
    """One line per rank, time to the right; each action is labelled with its kind and micro-batch where it fits.

    Args:
        timeline: the timeline.
        colour: use colours (unless the environment sets ``NO_COLOR``).
        width: columns to use at most; by default the terminal's, or 200 where there is none.
    """
    colour = colour and "NO_COLOR" not in os.environ
    names = [f"rank {rank}" for rank in range(timeline.ranks)]
    margin = max(map(len, names)) + 2
    available = (width or shutil.get_terminal_size((_WIDE, 24)).columns) - margin - 1
    with_stage = any(len(stages) > 1 for stages in stages_of(timeline))
    labels = {
        event: label(event, with_stage=with_stage)
        for row in timeline.compute
        for event in row
        if event.end > event.start
    }
    scale = _columns_per_time(timeline, labels, max(20, available))
    lines = [
        f"{name:<{margin}}" + _row([event for event in row if event in labels], labels, scale, colour)
        for name, row in zip(names, timeline.compute, strict=True)
    ]
    peaks = " ".join(map(str, timeline.peak_activations))
    return "\n".join(
        [
            summary(timeline),
            *(line.rstrip() for line in lines),
            f"makespan {time_of(float(timeline.makespan), timeline.unit)}, activations held per rank {peaks}",
        ]
    )


def _columns_per_time(timeline: Timeline, labels: dict[Event, str], available: int) -> float:
    """As many columns as the shortest action's label needs, if the whole timeline then fits."""
    if not labels:
        return 0.0
    unit = float(min(event.end - event.start for event in labels))
    wanted, most = max(map(len, labels.values())) + 1, available * unit / float(timeline.makespan)
    # Whole columns where possible: equal actions then have equal cells.
    return (min(wanted, int(most)) or most) / unit


def _row(row: Sequence[Event], labels: dict[Event, str], scale: float, colour: bool) -> str:
    text, column = "", 0
    for event in row:
        start, end = (max(column, round(float(time) * scale)) for time in (event.start, event.end))
        text += " " * (start - column) + _cell(labels[event], event.kind, end - start, colour)
        column = end
    return text


def _cell(text: str, kind: Kind, width: int, colour: bool) -> str:
    """``F3``, a line to the end of the action and a free column; the kind alone where that is too long."""
    if width > len(text):
        cell, gap = text + "─" * (width - len(text) - 1), " "
    elif width > 1:
        cell, gap = kind[0] + "─" * (width - 2), " "
    else:
        cell, gap = kind[0] * width, ""
    return f"\x1b[38;5;16;48;5;{_BACKGROUND[kind]}m{cell}\x1b[0m{gap}" if colour and cell else cell + gap
