"""How long the actions of each stage take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.dependencies import Number

PerStage = Number | Sequence[Number]


@dataclass(frozen=True)
class Costs:
    """Times of one micro-batch on one stage, each a number for all stages or a sequence with one per stage.

    Integers and fractions stay exact, so that a simulation can be compared with a formula by ``==``.

    Args:
        forward: forward pass.
        backward: whole backward pass, as ``B`` in a schedule.
        backward_input: its part for the stage's input, ``I``; by default what ``backward_weight`` leaves of
            ``backward``, or half of it.
        backward_weight: its part for the weights, ``W``; by default the rest of ``backward``.
        recompute: repeated forward pass, ``R``; by default ``forward``.
        send: time from the end of an action until its result is on another rank; per stage, that of the boundary
            above the stage. It delays the receiver and occupies neither rank.
        reduce: time to sum a stage's gradients over its copies. It overlaps with compute.

    All times have one unit, which is that of the simulation's results: seconds in, seconds out.

    Example:
        >>> from lightning_pipe import simulate
        >>> from lightning_pipe.schedules import GPipe
        >>> schedule = GPipe().build(ranks=2, micro_batches=2)
        >>> simulate(schedule, Costs(forward=[1, 3], backward=[2, 6])).makespan  # stage 1 is three times as slow
        21
    """

    forward: PerStage = 1
    backward: PerStage = 2
    backward_input: PerStage | None = None
    backward_weight: PerStage | None = None
    recompute: PerStage | None = None
    send: PerStage = 0
    reduce: PerStage = 0

    def check(self, stages: int) -> None:
        """Raise a :class:`ScheduleError` unless every sequence has one number per stage and none is negative."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Sequence) and len(value) != stages:
                raise ScheduleError(
                    f"Costs.{field.name} has {len(value)} numbers, but the schedule has {stages} stages.",
                    hint="Give one number for all stages, or one per stage.",
                )
            if any(at_stage(value, stage) < 0 for stage in range(stages) if value is not None):
                raise ScheduleError(f"Costs.{field.name} must not be negative, got {value}.")

    def duration(self, action: Action) -> Number:
        """The time of a compute action."""
        return _DURATIONS[action.kind](self, action.stage)

    def transfer(self, action: Action) -> Number:
        """The time for the result of a forward or backward action to reach the rank of the neighbouring stage."""
        boundary = action.stage if action.kind is Kind.FORWARD else action.stage - 1
        return at_stage(self.send, boundary)

    def input_part(self, stage: int) -> Number:
        """The time of ``I`` at a stage."""
        if self.backward_input is not None:
            return at_stage(self.backward_input, stage)
        if self.backward_weight is not None:
            return at_stage(self.backward, stage) - at_stage(self.backward_weight, stage)
        return _half(at_stage(self.backward, stage))

    def weight_part(self, stage: int) -> Number:
        """The time of ``W`` at a stage."""
        if self.backward_weight is not None:
            return at_stage(self.backward_weight, stage)
        return at_stage(self.backward, stage) - self.input_part(stage)


def at_stage(cost: PerStage, stage: int) -> Number:
    """A cost at one stage."""
    return cost[stage] if isinstance(cost, Sequence) else cost


def _half(value: Number) -> Number:
    if isinstance(value, int):
        return value // 2 if value % 2 == 0 else Fraction(value, 2)
    return value / 2


_DURATIONS: dict[Kind, Callable[[Costs, int], Number]] = {
    Kind.FORWARD: lambda costs, stage: at_stage(costs.forward, stage),
    Kind.BACKWARD: lambda costs, stage: at_stage(costs.backward, stage),
    Kind.BACKWARD_INPUT: Costs.input_part,
    Kind.BACKWARD_WEIGHT: Costs.weight_part,
    Kind.RECOMPUTE: lambda costs, stage: at_stage(costs.forward if costs.recompute is None else costs.recompute, stage),
    Kind.STEP: lambda costs, stage: 0,
}
