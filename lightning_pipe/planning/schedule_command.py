"""``lightning-pipe schedule``: draws a schedule, simulates and exports it, or compares all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_pipe import schedules
from lightning_pipe.errors import ConfigurationError, ScheduleError
from lightning_pipe.schedules import Schedule
from lightning_pipe.schedules.passes.recompute import Mode
from lightning_pipe.schedules.registry import ALIASES
from lightning_pipe.simulate.comparison import compare, table
from lightning_pipe.simulate.costs import Costs, PerStage
from lightning_pipe.simulate.simulator import simulate_batch

COMPARE = "compare"


def run_schedule(
    name: str,
    costs: Costs,
    ranks: int = 4,
    micro_batches: int = 8,
    stages: int | None = None,
    options: dict[str, Any] | None = None,
    recompute: Mode = "never",
    recompute_time: PerStage | None = None,
    png: str | None = None,
    csv: str | None = None,
) -> None:
    """Draw a schedule, simulate it and export it.

    Args:
        name: of the schedule, the path of a .csv file, or "compare": a table of all schedules.
        costs: times.
        ranks: in the pipeline.
        micro_batches: in a batch.
        stages: of the model (default: as many as the schedule needs).
        options: of the schedule, such as --options.virtual_stages 3.
        recompute: when activations are computed again.
        recompute_time: of a repeated forward pass (default: that of a forward pass).
        png: draw a picture (.png, .svg or .pdf).
        csv: write the schedule in the format of torch's pipelining.
    """
    costs = replace(costs, recompute=recompute_time)
    if name == COMPARE:
        if options or png or csv:
            raise ConfigurationError("schedule compare shows all schedules: it takes no --options, --png and --csv.")
        rows = compare(ranks, micro_batches, stages, costs, recompute)
        if all(row.schedule is None for row in rows):
            raise ScheduleError(rows[0].problem)
        print(table(rows))
        return
    family = schedules.get(name, **(options or {}))

    def build(micro_batches: int) -> Schedule:
        return schedules.with_recompute(family.build(ranks, micro_batches, stages), recompute)

    timeline = simulate_batch(build, micro_batches, costs)
    timeline = replace(timeline, title=f"{name} ({family.label})" if name.lower() in ALIASES else family.label)
    print(timeline)
    for path, write in ((png, timeline.plot), (csv, build(micro_batches).to_csv)):
        if path is not None:
            _write(path, write)


def _write(path: str, write: Callable[[str], None]) -> None:
    try:
        write(path)
    except (OSError, ValueError) as error:
        told = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"{path} cannot be written: {told}.") from error
    print(f"wrote {path}")
