"""``lightning-pipe schedule``: draws a schedule, simulates and exports it, or compares all."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_pipe import schedules
from lightning_pipe.errors import ConfigurationError, ScheduleError
from lightning_pipe.schedules import Schedule
from lightning_pipe.schedules.passes.recompute import Mode
from lightning_pipe.schedules.registry import ALIASES
from lightning_pipe.simulate.comparison import compare, simulate_batch, table
from lightning_pipe.simulate.costs import Costs, PerStage

COMPARE = "compare"


def schedule(
    name: str,
    costs: Costs,
    ranks: int = 4,
    micro_batches: int = 8,
    stages: int | None = None,
    options: dict[str, Any] | None = None,
    recompute: Mode = "never",
    recompute_time: PerStage | None = None,
    profile: str | None = None,
    micro_batch_size: int | None = None,
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
        profile: file of `lightning-pipe profile` with times in seconds, in the place of the times below.
        micro_batch_size: samples of a micro-batch, with a profile (default: the smallest measured).
        png: draw a picture (.png, .svg or .pdf), or all of them into this folder.
        csv: write the schedule in the format of torch's pipelining.
    """
    times = _times(replace(costs, recompute=recompute_time), profile, micro_batch_size)
    if name == COMPARE:
        if options or csv:
            raise ConfigurationError("schedule compare shows all schedules: it takes no --options and --csv.")
        _compare(ranks, micro_batches, stages, times, recompute, profile, png)
        return
    family = schedules.get(name, **(options or {}))

    def build(micro_batches: int) -> Schedule:
        return schedules.with_recompute(family.build(ranks, micro_batches, stages), recompute)

    own = build(micro_batches)
    timeline = simulate_batch(own, build, times(own) if callable(times) else times)
    timeline = replace(timeline, title=f"{name} ({family.label})" if name.lower() in ALIASES else family.label)
    if profile is not None:
        timeline = replace(timeline, unit="s", title=f"{timeline.title}, {Path(profile).name}")
    print(timeline)
    for path, write in ((png, timeline.plot), (csv, own.to_csv)):
        if path is not None:
            _write(path, write)


def _compare(
    ranks: int,
    micro_batches: int,
    stages: int | None,
    times: Costs | Callable[[Schedule], Costs],
    recompute: Mode,
    profile: str | None,
    png: str | None,
) -> None:
    rows = compare(ranks, micro_batches, stages, times, recompute)
    if all(row.schedule is None for row in rows):
        raise ScheduleError(rows[0].problem)
    print(table(rows))
    if profile is not None:
        print(f"times: from {profile}, without optimizer steps and sums of gradients over copies of weights")
    if png is not None:
        folder = Path(png)
        _write(png, lambda _: folder.mkdir(parents=True, exist_ok=True), silent=True)
        for row in rows:
            if row.timeline is not None:
                _write(str(folder / (re.sub(r"\W+", "_", row.label) + ".png")), row.timeline.plot)


def _times(costs: Costs, profile: str | None, samples: int | None) -> Costs | Callable[[Schedule], Costs]:
    """The times of the command line, or those of a profile, which leave none to be given."""
    if profile is None:
        if samples is not None:
            raise ConfigurationError(
                "--micro-batch-size says how many samples the costs of a profile are for: give --profile, too."
            )
        return costs
    # torch takes seconds, and drawing schedules without a profile needs none
    from lightning_pipe.planning.cost_profile import CostProfile
    from lightning_pipe.planning.prediction import Predictor, stage_costs

    if costs != Costs():
        given = [name for name, usual in vars(Costs()).items() if getattr(costs, name) != usual]
        raise ConfigurationError(f"--profile has all times: leave {', '.join(f'--{name}' for name in given)} away.")
    measured = CostProfile.load(profile)
    size, cut = samples or min(measured.sizes), Predictor(measured).cut

    def of_stages(schedule: Schedule) -> Costs:
        """The stages are cut so that the slowest is fastest; steps and reductions are no part, as in plans."""
        copies = [len(schedule.holders(stage)) for stage in range(schedule.stages)]
        return replace(stage_costs(measured, cut(schedule.stages, size), size, copies), reduce=0, step=0)

    return of_stages


def _write(path: str, write: Callable[[str], None], *, silent: bool = False) -> None:
    try:
        write(path)
    except (OSError, ValueError) as error:
        told = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"{path} cannot be written: {told}.") from error
    if not silent:
        print(f"wrote {path}")
