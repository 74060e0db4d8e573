"""What the drawings have in common: labels, titles, and colours that colour-blind readers can tell apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_pipe.schedules.action import Kind
from lightning_pipe.schedules.dependencies import Number
from lightning_pipe.text import several

if TYPE_CHECKING:
    from lightning_pipe.simulate.timeline import Event, Timeline

COLOURS: dict[Kind, str] = {
    Kind.FORWARD: "#56B4E9",
    Kind.BACKWARD: "#E69F00",
    Kind.BACKWARD_INPUT: "#E8743B",
    Kind.BACKWARD_WEIGHT: "#2BB58A",
    Kind.RECOMPUTE: "#F0E442",
    Kind.STEP: "#CC79A7",
    Kind.REDUCE: "#8C8C8C",
}
"""After the palette of Okabe and Ito."""

NAMES: dict[Kind, str] = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input",
    Kind.BACKWARD_WEIGHT: "backward, weights",
    Kind.RECOMPUTE: "recompute",
    Kind.STEP: "optimizer step",
    Kind.REDUCE: "reduce gradients",
}


def stages_of(timeline: Timeline) -> tuple[tuple[int, ...], ...]:
    """For every row the stages that it computes, those of pipe 0 first."""
    return tuple(
        tuple(dict.fromkeys(stage for _, stage in sorted({(event.pipe, event.stage) for event in row})))
        for row in timeline.compute
    )


def row_names(timeline: Timeline) -> tuple[str, ...]:
    """What the rows are: their stages and, where a run was measured, the rank of their process.

    A schedule by itself has rows and stages. Ranks are those of processes, as Lightning counts them: in a run of a
    linear schedule rank 0 computes the *last* stage, because loggers and the progress bar live on rank 0.

    Example:
        >>> from lightning_pipe.simulate import Timeline
        >>> events = [(0, "F", 0, 0, 0, 0, 1), (1, "F", 1, 0, 0, 1, 2)]
        >>> row_names(Timeline.of(events)), row_names(Timeline.of(events, global_ranks=(1, 0)))
        (('stage 0', 'stage 1'), ('rank 1: stage 0', 'rank 0: stage 1'))
    """
    names = []
    for row, stages in enumerate(stages_of(timeline)):
        name = ("stage " if len(stages) < 2 else "stages ") + (" ".join(map(str, stages)) or "none")
        names.append(f"rank {timeline.global_ranks[row]}: {name}" if timeline.global_ranks else name)
    return tuple(names)


def label(event: Event, *, with_stage: bool) -> str:
    """``F3``, or ``2F3`` where a rank computes several stages."""
    micro_batch = "" if event.micro_batch is None else event.micro_batch
    return f"{event.stage if with_stage else ''}{event.kind}{micro_batch}"


def summary(timeline: Timeline) -> str:
    """``1f1b: 4 ranks, 8 micro-batches, bubble ratio 27.3 %``.

    A schedule without a flush fills and drains once in a run, not once in a batch: its own bubble is the steady one.
    """
    micro_batches = len({event.micro_batch for event in timeline.events} - {None})
    return (
        f"{timeline.title}: " * bool(timeline.title)
        + f"{several(timeline.ranks, 'rank')}, {several(micro_batches, 'micro-batch')}, "
        + "bubble ratio "
        + (f"{percent(timeline.steady)} in the steady state, " if timeline.steady is not None else "")
        + percent(timeline.bubble_ratio)
        + ("" if timeline.synchronous else " with filling and draining")
    )


def percent(share: Number) -> str:
    """``27.3 %``."""
    return f"{100 * float(share):.1f} %"


def time_of(value: float, unit: str) -> str:
    """A time for reading: ``33``, ``2.5``, ``12.3 ms``."""
    if unit == "s":
        return f"{value * 1000:.4g} ms" if value < 1 else f"{value:.4g} s"
    return f"{value:.6g}"
