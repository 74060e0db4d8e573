"""Timelines as pictures, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

from lightning_pipe.schedules.action import Kind
from lightning_pipe.simulate.style import COLOURS, NAMES, row_names, stages_of, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lightning_pipe.simulate.timeline import Event, Timeline

_ROW_INCHES, _MARGIN_INCHES = 0.42, 1.15
_DIGIT_INCHES = 0.085
_FIGURE_INCHES = (8.0, 16.0)
_FONT_POINTS, _LEAST_POINTS = 8.0, 4.0
_DIGIT_HEIGHT = 0.8
"""Of a digit, in font sizes, with a margin."""


def plot(timeline: Timeline, path: str | PathLike[str]) -> None:
    """Draw a row per rank, a box per action with its micro-batch, and the bubble ratio in the title."""
    # Not pyplot: no window system is looked for, and no global state is left behind.
    from matplotlib.figure import Figure

    width = _width(timeline)
    figure = Figure(figsize=(width, _MARGIN_INCHES + _ROW_INCHES * timeline.ranks), layout="constrained")
    axes = figure.add_subplot()
    for number, row in enumerate(timeline.compute):
        axes.axhspan(number - 0.42, number + 0.42, color="#F2F2F2", linewidth=0)
        _boxes(axes, row, number, _shades(timeline, number), 0.93 * width / float(timeline.makespan or 1))
    for event in timeline.events:
        if event.kind is Kind.REDUCE:
            span = (float(event.start), float(event.end - event.start))
            axes.broken_barh([span], (event.rank + 0.34, 0.12), facecolors=COLOURS[Kind.REDUCE])
    _decorate(figure, axes, timeline)
    figure.savefig(path, dpi=160)


def _width(timeline: Timeline) -> float:
    """Wide enough for a number in the shortest box, within reason."""
    durations = [float(event.end - event.start) for row in timeline.compute for event in row if event.end > event.start]
    low, high = _FIGURE_INCHES
    return min(high, max(low, 0.27 * float(timeline.makespan) / min(durations, default=1.0)))


def _shades(timeline: Timeline, number: int) -> dict[tuple[int, int], float]:
    """How light the ``(pipe, stage)`` of a row are: later pipes of several, or a row's later stages.

    A shade means the same in every row: in Chimera all of pipe 1 is lighter, wherever its stages are.
    """
    row = timeline.compute[number]
    if all(len(stages) < 2 for stages in stages_of(timeline)):
        return {(event.pipe, event.stage): 0.0 for event in row}
    pipes, stages = _pipes(timeline), sorted({event.stage for event in row})
    return {
        (event.pipe, event.stage): 0.7
        * (pipes.index(event.pipe) / len(pipes) if len(pipes) > 1 else stages.index(event.stage) / len(stages))
        for event in row
    }


def _pipes(timeline: Timeline) -> list[int]:
    return sorted({event.pipe for row in timeline.compute for event in row})


def _boxes(
    axes: Axes, row: Sequence[Event], rank: int, shades: dict[tuple[int, int], float], inches_per_time: float
) -> None:
    for event in row:
        start, length = float(event.start), float(event.end - event.start)
        if not length:
            continue
        colour = _lighter(COLOURS[event.kind], shades[event.pipe, event.stage])
        axes.broken_barh([(start, length)], (rank - 0.42, 0.84), facecolors=colour, edgecolor="white", linewidth=0.8)
        if event.micro_batch is not None:
            _number(axes, (start + length / 2, rank), str(event.micro_batch), length * inches_per_time)


def _number(axes: Axes, centre: tuple[float, float], number: str, inches: float) -> None:
    """Write a number into a box: upright and smaller where the box is narrow, nowhere if nobody could read it."""
    wide = len(number) * _DIGIT_INCHES < inches
    size = _FONT_POINTS if wide else min(_FONT_POINTS, 72 * inches / _DIGIT_HEIGHT)
    if size >= _LEAST_POINTS:
        vertical = "center_baseline" if wide else "center"
        angle = 0 if wide else 90
        axes.text(*centre, number, ha="center", va=vertical, rotation=angle, fontsize=size, color="#1A1A1A")


def _lighter(colour: str, share: float) -> str:
    channels = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * share):02x}" for channel in channels)


def _decorate(figure: Figure, axes: Axes, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    milliseconds = timeline.unit == "s" and timeline.makespan < 1
    axes.set_title(summary(timeline), fontsize=11, loc="left")
    axes.set_yticks(range(timeline.ranks), row_names(timeline))
    axes.invert_yaxis()
    axes.set_xlim(0, float(timeline.makespan) or 1)
    axes.set_xlabel("time" + f" ({'ms' if milliseconds else timeline.unit})" * bool(timeline.unit), fontsize=9)
    if milliseconds:
        axes.xaxis.set_major_formatter(lambda time, _: f"{time * 1000:g}")
    axes.tick_params(labelsize=9, left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    kinds = [
        kind for kind in COLOURS if any(event.kind is kind and event.end > event.start for event in timeline.events)
    ]
    handles = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds]
    if any(len(stages) > 1 for stages in stages_of(timeline)):
        pipes = _pipes(timeline)
        later = "later stage of the row" if len(pipes) < 2 else f"pipe{'s' * (len(pipes) > 2)} {_span(pipes[1:])}"
        handles.append(Patch(color=_lighter(COLOURS[kinds[0]], 0.4), label=f"lighter: {later}"))
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), frameon=False, fontsize=9)


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) < 2 else f"{numbers[0]} to {numbers[-1]}"
