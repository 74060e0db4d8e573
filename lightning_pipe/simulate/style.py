"""What the drawings have in common: labels, titles, and colours that colour-blind readers can tell apart."""

from __future__ import annotations

from lightning_pipe.schedules.ir import Kind
from lightning_pipe.simulate.timeline import Event, Timeline

COLOURS: dict[Kind, str] = {
    Kind.FORWARD: "#56B4E9",
    Kind.BACKWARD: "#E69F00",
    Kind.BACKWARD_INPUT: "#E69F00",
    Kind.BACKWARD_WEIGHT: "#2BB58A",
    Kind.RECOMPUTE: "#F0E442",
    Kind.STEP: "#CC79A7",
    Kind.REDUCE: "#8C8C8C",
}
"""The palette of Okabe and Ito; a backward that is not split has the colour of its first part."""

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
    """For every rank the stages it computes, ascending."""
    return tuple(tuple(sorted({event.stage for event in row})) for row in timeline.compute)


def label(event: Event, *, with_stage: bool) -> str:
    """``F3``, or ``2F3`` where a rank computes several stages."""
    micro_batch = "" if event.micro_batch is None else event.micro_batch
    return f"{event.stage if with_stage else ''}{event.kind}{micro_batch}"


def summary(timeline: Timeline) -> str:
    """``1f1b: 4 ranks, 8 micro-batches, bubble ratio 27.3 %``."""
    micro_batches = len({event.micro_batch for event in timeline.events} - {None})
    return (
        f"{timeline.title}: " * bool(timeline.title)
        + f"{counted(timeline.ranks, 'rank')}, {counted(micro_batches, 'micro-batch', 'micro-batches')}, "
        + f"bubble ratio {float(timeline.bubble_ratio):.1%}".replace("%", " %")
    )


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def time_of(value: float, unit: str) -> str:
    """A time for reading: ``33``, ``2.5``, ``12.3 ms``."""
    if unit == "s":
        return f"{value * 1000:.4g} ms" if value < 1 else f"{value:.4g} s"
    return f"{value:.6g}"
