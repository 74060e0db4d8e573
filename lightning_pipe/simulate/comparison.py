"""All schedules side by side: time, memory and messages for the same model on the same ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_pipe import schedules
from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules import Family, Kind, Schedule
from lightning_pipe.schedules.dependencies import Number
from lightning_pipe.schedules.passes.recompute import Mode
from lightning_pipe.simulate.costs import Costs
from lightning_pipe.simulate.simulator import simulate_batch
from lightning_pipe.simulate.timeline import Timeline, ratio
from lightning_pipe.text import table as text_table


@dataclass(frozen=True)
class Comparison:
    """One schedule in the comparison.

    Args:
        label: name and options.
        schedule: the schedule; ``None`` if it cannot be built.
        timeline: its simulation.
        bubble_ratio: idle share of the batch; without a flush, of the steady state.
        time: of the batch; without a flush, of as many micro-batches in the steady state.
        activations: the most that a rank holds, in micro-batches on 1/ranks of the model.
        weights: the most that a rank holds with all versions, in 1/ranks of the model.
        messages: between ranks in one batch.
        problem: why it cannot be built.
    """

    label: str
    schedule: Schedule | None = None
    timeline: Timeline | None = None
    bubble_ratio: Number = 0
    time: Number = 0
    activations: Number = 0
    weights: Number = 0
    messages: int = 0
    problem: str = ""


def compare(
    ranks: int,
    micro_batches: int,
    stages: int | None = None,
    costs: Costs | None = None,
    recompute: Mode = "never",
) -> list[Comparison]:
    """Simulate every registered schedule in its variants.

    Args:
        ranks: number of ranks.
        micro_batches: number of micro-batches.
        stages: cut the model into this many stages for all schedules; by default each schedule's own number.
        costs: times of one stage; without ``stages``, of 1/ranks of the model, whatever the stages of a schedule.
        recompute: recompute activations.

    Returns:
        A row for each schedule. A row whose ``schedule`` is ``None`` says in ``problem`` why it cannot be built.

    Raises:
        ScheduleError: the costs have a number for each stage, and ``stages`` is not given.

    Example:
        >>> [row.label for row in compare(ranks=4, micro_batches=8) if row.bubble_ratio == 0]
        ['pipedream', 'pipedream_2bw']
    """
    return [
        _compared(variant, ranks, micro_batches, stages, costs or Costs(), recompute)
        for name in schedules.names()
        for variant in schedules.get(name).variants()
    ]


def _compared(
    family: Family,
    ranks: int,
    micro_batches: int,
    stages: int | None,
    costs: Costs,
    recompute: Mode,
) -> Comparison:
    def built(micro_batches: int) -> Schedule:
        with warnings.catch_warnings():
            # What does not fit a family's multiples is still comparable.
            warnings.simplefilter("ignore")
            return schedules.with_recompute(family.build(ranks, micro_batches, stages), recompute)

    try:
        schedule = built(micro_batches)
    except ScheduleError as error:
        return Comparison(family.label, problem=error.message)
    own = costs if stages is not None else costs.of_a_share(ratio(ranks, schedule.stages))
    timeline = simulate_batch(built, micro_batches, own)
    bubble = timeline.bubble_ratio if timeline.steady is None else timeline.steady
    held = (len(schedule.stages_of(rank)) * schedule.weight_versions[rank] for rank in range(ranks))
    sends = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
    return Comparison(
        family.label,
        schedule,
        timeline,
        bubble,
        time=ratio(sum(timeline.busy), ranks * (1 - bubble)),
        activations=ratio(max(timeline.peak_activations) * ranks, schedule.stages),
        weights=ratio(max(held) * ranks, schedule.stages),
        messages=sum(action.kind in sends for order in schedules.lower(schedule) for action in order),
    )


def table(rows: Iterable[Comparison]) -> str:
    """The comparison as text, with what the columns mean."""
    cells, problems = [], []
    for row in rows:
        if row.schedule is None or row.timeline is None:
            problems.append(f"{row.label}: {row.problem}")
            continue
        times = f"{float(row.time):.6g}", f"{100 * float(row.bubble_ratio):.1f} %"
        held = f"{float(row.activations):.4g}", f"{float(row.weights):.4g}"
        cells.append((row.label, str(row.schedule.stages), *times, *held, str(row.messages)))
    head = ("schedule", "stages", "time", "bubble", "activations", "weights", "messages")
    return "\n".join([text_table(head, cells), *problems, *_LEGEND])


_LEGEND = (
    "",
    "time, bubble: of a batch, or, without a flush, of as many micro-batches in the steady state",
    "activations: most on a rank, in micro-batches on 1/ranks of the model",
    "weights: most on a rank with all copies and versions, in 1/ranks of the model",
)
