"""What every rank holds in memory in the course of a batch, in bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lightning_pipe.schedules.action import Kind
from lightning_pipe.schedules.dependencies import Number, versions_after
from lightning_pipe.schedules.ir import Schedule
from lightning_pipe.simulate.costs import PerStage, at_stage

_MAKE_GRADIENTS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Memory:
    """Bytes of one stage, each a number for all stages or a sequence with one per stage.

    Args:
        weights: of one version of the stage's parameters.
        gradients: held from the first backward pass of a batch to the optimizer step; by default as ``weights``.
        optimizer: state of the optimizer on one rank, after sharding; by default Adam's two moments.
        activations: that a forward pass keeps for its backward pass, for one micro-batch, the input included.
        inputs: the stage's input for one micro-batch: what is kept where activations are recomputed.
        messages: one micro-batch's message over the boundary above the stage, which predictions add.
        summed: of ``gradients`` what is still held behind a stage's last backward pass of a batch, where its holders
            divide the sums; by default all of them.

    Example:
        >>> Memory(weights=400).at(0).optimizer
        800
    """

    weights: PerStage = 0
    gradients: PerStage | None = None
    optimizer: PerStage | None = None
    activations: PerStage = 0
    inputs: PerStage = 0
    messages: PerStage = 0
    summed: PerStage | None = None

    def at(self, stage: int) -> StageBytes:
        """The bytes of one stage."""
        weights, activations = at_stage(self.weights, stage), at_stage(self.activations, stage)
        gradients = weights if self.gradients is None else at_stage(self.gradients, stage)
        return StageBytes(
            weights,
            gradients,
            2 * weights if self.optimizer is None else at_stage(self.optimizer, stage),
            activations,
            at_stage(self.inputs, stage),
            at_stage(self.messages, stage),
            gradients if self.summed is None else at_stage(self.summed, stage),
        )


class StageBytes(NamedTuple):
    """`Memory` at one stage."""

    weights: Number
    gradients: Number
    optimizer: Number
    activations: Number
    inputs: Number
    messages: Number
    summed: Number


class Held(NamedTuple):
    """What a rank holds at some point of its order, in bytes."""

    weights: Number
    gradients: Number
    optimizer: Number
    activations: Number

    @property
    def total(self) -> Number:
        """All of it."""
        return sum(self)


def memory_over_time(schedule: Schedule, memory: Memory) -> tuple[tuple[Held, ...], ...]:
    """For every rank what it holds at the beginning, and while and after each of its actions.

    This depends on the order of its actions alone. Weights are held all the time, more than once where a rank holds
    several versions of them; the optimizer's state is that of a run under way. Gradients are dropped by the optimizer
    step. An activation is held from its forward pass, or its recomputation, to the end of its last backward action.
    Messages are left out.

    Args:
        schedule: the schedule, with its recomputation.
        memory: bytes by stage.

    Example:
        >>> from lightning_pipe.schedules import OneFOneB
        >>> points = memory_over_time(OneFOneB().build(4, 8), Memory(weights=10, activations=5))
        >>> [peak(rank).activations for rank in points]
        [20, 15, 10, 5]
    """
    return tuple(tuple(held_by(rank, schedule, memory)) for rank in range(schedule.ranks))


def peak(points: Iterable[Held]) -> Held:
    """The moment at which a rank holds most."""
    return max(points, key=lambda held: held.total)


def held_by(rank: int, schedule: Schedule, memory: Memory) -> Iterator[Held]:
    """`memory_over_time` of one rank."""
    order, versions = schedule.actions[rank], versions_after(schedule, rank)
    sizes = {stage: memory.at(stage) for stage in schedule.stages_of(rank)}
    recomputed = {action[1:4] for action in order if action.kind is Kind.RECOMPUTE}
    last = {action.stage: index for index, action in enumerate(order) if action.kind in _MAKE_GRADIENTS}
    weights = sum(own.weights for own in sizes.values())
    optimizer = sum(own.optimizer for own in sizes.values())
    gradients: Number = 0
    activations: Number = 0
    with_gradients: set[int] = set()
    older: Counter[int] = Counter()  # versions of a stage's weights beside its newest
    yield Held(weights, gradients, optimizer, activations)
    for index, action in enumerate(order):
        kind, stage = action.kind, action.stage
        own, back = sizes[stage], kind in _MAKE_GRADIENTS
        # a step makes a version while older ones are needed; the last backward action on a version frees it
        more = versions[index][1] - 1 - older[stage] if index in versions else 0
        older[stage] += more
        if kind is Kind.FORWARD:
            activations += own.inputs if action[1:4] in recomputed else own.activations
        elif kind is Kind.RECOMPUTE:
            activations += own.activations - own.inputs
        elif kind is Kind.STEP:
            weights += more * own.weights
        elif back and stage not in with_gradients:
            with_gradients.add(stage)
            gradients += own.gradients
        yield Held(weights, gradients, optimizer, activations)
        if back:
            activations -= own.activations
            weights += more * own.weights
            if last[stage] == index:
                gradients += own.summed - own.gradients
        elif kind is Kind.STEP and stage in with_gradients:
            with_gradients.remove(stage)
            gradients -= own.gradients
        yield Held(weights, gradients, optimizer, activations)
