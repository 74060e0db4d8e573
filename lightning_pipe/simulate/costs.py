"""How long the actions of each stage take, and what they occupy meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Real
from typing import Any, get_args

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.dependencies import Links, Number, Occupied
from lightning_pipe.schedules.family import check_choice

PerStage = Number | Sequence[Number]

_OF_THE_MODEL = ("forward", "backward", "backward_input", "backward_weight", "recompute", "reduce", "step")
"""Times that a stage twice as large has twice; messages are the same for any stage."""
_PER_STAGE = (*_OF_THE_MODEL, "send")
_GIVE = "Give one number for all stages, or one per stage."


@dataclass(frozen=True)
class Costs:
    """Times of one micro-batch on one stage, each a number for all stages or a sequence with one per stage.

    Integers and fractions stay exact, so that a simulation can be compared with a formula by ``==``.

    Args:
        forward: forward pass; one over two micro-batches takes that of each.
        backward: whole backward pass, as ``B`` in a schedule.
        backward_input: its part for the stage's input, ``I``; by default what ``backward_weight`` leaves of
            ``backward``, or half of it.
        backward_weight: its part for the weights, ``W``; by default the rest of ``backward``.
        recompute: repeated forward pass, ``R``; by default ``forward``.
        send: time from the end of an action until its result is on another rank; per stage, that of the boundary
            above the stage.
        reduce: time to sum a stage's gradients over its copies, those of other replicas included.
        step: optimizer step, after a stage's reduction; without a flush, of every ``STEP``.
        occupies: who does nothing else during a message: the ``"sender"`` until it is sent, the ``"receiver"`` from
            when it wants it, ``"both"``, or ``"neither"``: then it only delays the receiver.
        links: between two ranks messages travel all at once (``"free"``), one after the other in each direction
            (``"directed"``), or one after the other in both directions together (``"shared"``).
        overlap_reduce: reductions run beside compute, where the schedule's option ``sync`` does not put them off;
            otherwise they begin when their ranks have nothing left to compute. Without a flush a step waits for
            its reduction in any case.
        overlap: the share of the messages of joined forward and backward passes that their computation hides, 0 to 1;
            the two are then one action. ``None``: they run one after the other, as in this package's engine.

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
    step: PerStage = 0
    occupies: Occupied = "neither"
    links: Links = "free"
    overlap_reduce: bool = True
    overlap: Number | None = None

    def check(self, stages: int) -> None:
        """Raise a :class:`ScheduleError` unless there is one time for all stages or one per stage, none negative."""
        check_choice("Costs", get_args(Occupied), occupies=self.occupies)
        check_choice("Costs", get_args(Links), links=self.links)
        for name in (*_PER_STAGE, "overlap"):
            value = getattr(self, name)
            if value is getattr(Costs, name):
                continue  # the default
            several = name in _PER_STAGE and isinstance(value, Sequence)
            if several and len(value) != stages:
                raise ScheduleError(
                    f"Costs.{name} has {len(value)} numbers, but the schedule has {stages} stages.", hint=_GIVE
                )
            numbers = value if several else [value]
            if not all(isinstance(each, Real) and 0 <= float(each) < math.inf for each in numbers):
                hint = _GIVE if name in _PER_STAGE else "Give one number."
                raise ScheduleError(f"Costs.{name} must be a number, 0 or more, got {value!r}.", hint=hint)
        if self.overlap is not None and self.overlap > 1:
            hint = "Give overlap=0.8 where computation hides 80 % of the messages."
            raise ScheduleError(f"Costs.overlap is a share, at most 1, got {self.overlap}.", hint=hint)

    def duration(self, action: Action) -> Number:
        """The time of a compute action."""
        return _DURATIONS[action.kind](self, action.stage)

    def transfer(self, action: Action) -> Number:
        """The time for the result of a forward or backward action to reach the rank of the neighbouring stage."""
        return at_stage(self.send, action.stage if action.kind is Kind.FORWARD else action.stage - 1)

    def of_a_share(self, share: Number) -> Costs:
        """The costs of a stage that is this share of the present one; its messages are as large.

        Raises:
            ScheduleError: a cost has one number per stage.
        """
        scaled: dict[str, Any] = {}
        for name in _OF_THE_MODEL:
            value = getattr(self, name)
            if isinstance(value, Sequence):
                raise ScheduleError(
                    f"Costs.{name} has one number per stage, but schedules have different numbers of stages.",
                    hint="Say how many stages there are, or give one number for all.",
                )
            if value is not None:
                scaled[name] = value * share
        return replace(self, **scaled)

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
    Kind.STEP: lambda costs, stage: at_stage(costs.reduce, stage) + at_stage(costs.step, stage),
}
