"""Divides the measured idle time of a run by its causes, with the simulator's help."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lightning_pipe.schedules import Kind, Schedule
from lightning_pipe.simulate import Costs, simulate

Spent = Mapping[tuple[Kind, int], tuple[float, int]]
"""For each kind of action and stage the seconds and the number of its actions."""


class IdleShares(NamedTuple):
    """Shares of all ranks' time; they add up to the measured bubble.

    Args:
        schedule: idle by the schedule if all stages took the same time.
        imbalance: further idle time because they do not.
        messages: waiting for messages beyond that.
        host: the engine's own work.
        sums: beginning and awaiting sums of gradients.
    """

    schedule: float
    imbalance: float
    messages: float
    host: float
    sums: float

    def __str__(self) -> str:
        names = ["by the schedule", "imbalance of the stages", "waiting for messages", "host work"]
        if self.sums >= 0.0005:  # else there are no copies
            names.append("sums of gradients")
        return ", ".join(f"{100 * share:.1f} % {name}" for share, name in zip(self, names, strict=False))


def measured_costs(spent: Iterable[Spent], stages: int) -> Costs | None:
    """The mean times of all stages' actions, from what every rank has measured; ``None`` where one has not run."""
    sums: dict[tuple[Kind, int], tuple[float, int]] = {}
    for of_rank in spent:
        for key, (seconds, number) in of_rank.items():
            before = sums.get(key, (0.0, 0))
            sums[key] = before[0] + seconds, before[1] + number
    mean = {key: seconds / number for key, (seconds, number) in sums.items()}
    forward = [mean.get((Kind.FORWARD, stage)) for stage in range(stages)]
    halves = [[mean.get((kind, stage), 0.0) for stage in range(stages)] for kind in _HALVES]
    backward = [mean.get((Kind.BACKWARD, stage), i + w) for stage, (i, w) in enumerate(zip(*halves, strict=True))]
    if any(time is None for time in forward) or not all(backward):
        return None
    again = [mean.get((Kind.RECOMPUTE, stage), time) for stage, time in enumerate(forward)]
    split = any(halves[0])
    return Costs(
        forward,  # type: ignore[arg-type]
        backward,
        backward_input=halves[0] if split else None,
        backward_weight=halves[1] if split else None,
        recompute=again,  # type: ignore[arg-type]
    )


_HALVES = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def idle_shares(schedule: Schedule, costs: Costs, measured: float, host: float, sums: float = 0.0) -> IdleShares:
    """Divide a measured bubble by its causes.

    Args:
        schedule: of a batch.
        costs: the measured times of its stages.
        measured: the idle share of the ranks' time.
        host: the share in which ranks neither computed nor waited for a message.
        sums: of this the share in which they began and awaited sums of gradients.
    """
    equal = {
        name: sum(value) / len(value)
        for name in ("forward", "backward", "backward_input", "backward_weight", "recompute")
        if (value := getattr(costs, name)) is not None
    }
    by_schedule = float(simulate(schedule, Costs(**equal)).bubble_ratio)
    by_stages = float(simulate(schedule, costs).bubble_ratio)
    imbalance = min(by_stages, measured) - by_schedule
    messages = max(0.0, measured - max(by_stages, 0.0) - host)
    rest = measured - by_schedule - imbalance - messages
    # What is idle for no other reason is the host's, so that the shares add up.
    sums = max(0.0, min(sums, rest))
    return IdleShares(by_schedule, imbalance, messages, rest - sums, sums)
