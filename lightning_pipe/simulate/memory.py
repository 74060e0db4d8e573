"""What every rank holds in memory over the time of a batch, in bytes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from lightning_pipe.schedules.action import Kind
from lightning_pipe.schedules.dependencies import Number, Run, Timed, versions_after
from lightning_pipe.schedules.ir import Schedule
from lightning_pipe.simulate.costs import Costs, PerStage, at_stage
from lightning_pipe.simulate.simulator import run

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
        messages: one micro-batch's message over the boundary above the stage, activation or gradient.
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
    """What a rank holds from ``time`` on, in bytes."""

    time: Number
    weights: Number
    gradients: Number
    optimizer: Number
    activations: Number
    messages: Number

    @property
    def total(self) -> Number:
        """All of it."""
        return sum(self[1:])


def memory_over_time(schedule: Schedule, memory: Memory, costs: Costs | None = None) -> tuple[tuple[Held, ...], ...]:
    """For every rank what it holds, from each change to the next.

    Weights are held all the time, more than once where a rank holds several versions of them; the optimizer's state
    is that of a run under way. Gradients are dropped by the optimizer step. An activation is held from its forward
    pass, or its recomputation, to the end of its last backward action; a message by its sender until it is sent and
    by its receiver until the action that needs it begins.

    Args:
        schedule: the schedule, with its recomputation.
        memory: bytes by stage.
        costs: times, which say how long messages are held. Peaks of the rest depend on the order of actions alone:
            without costs nothing is simulated, messages take no time, and a rank's actions one unit each.

    Example:
        >>> from lightning_pipe.schedules import OneFOneB
        >>> points = memory_over_time(OneFOneB().build(4, 8), Memory(weights=10, activations=5))
        >>> [peak(rank).activations for rank in points]
        [20, 15, 10, 5]
    """
    if costs is None:
        orders = [[Timed(action, index, index + 1) for index, action in enumerate(order)] for order in schedule.actions]
        ran = Run(orders, [])
    else:
        ran = run(schedule, costs)
    changes: list[list[Change]] = [[] for _ in range(schedule.ranks)]
    for rank, timed in enumerate(ran.played):
        changes[rank] += _of_activations(timed, memory)
        changes[rank] += _of_gradients(timed, memory)
        changes[rank] += _of_versions(schedule, rank, timed, memory)
    for message in ran.messages:
        forward = message.action.kind is Kind.FORWARD
        boundary = message.action.stage - (0 if forward else 1)
        size = memory.at(boundary).messages
        for rank, end in ((message.sender, message.end), (message.receiver, message.taken)):
            changes[rank] += [(message.start, "messages", size), (end, "messages", -size)]
    return tuple(tuple(_curve(schedule, rank, memory, own)) for rank, own in enumerate(changes))


def peak(points: tuple[Held, ...]) -> Held:
    """The moment at which a rank holds most."""
    return max(points, key=lambda held: held.total)


Change = tuple[Number, str, Number]
"""``(time, part, bytes)``: a part of `Held` grows by so many bytes."""


def _of_activations(timed: list[Timed], memory: Memory) -> Iterator[Change]:
    recomputed = {entry.action[1:4] for entry in timed if entry.action.kind is Kind.RECOMPUTE}
    sizes = {stage: memory.at(stage) for stage in {entry.action.stage for entry in timed}}
    for action, start, end in timed:
        own = sizes[action.stage]
        match action.kind:
            case Kind.FORWARD:
                yield start, "activations", own.inputs if action[1:4] in recomputed else own.activations
            case Kind.RECOMPUTE:
                yield start, "activations", own.activations - own.inputs
            case Kind.BACKWARD | Kind.BACKWARD_WEIGHT:
                yield end, "activations", -own.activations


def _of_gradients(timed: list[Timed], memory: Memory) -> Iterator[Change]:
    """From the first backward action that makes gradients of weights to the step; behind the last they are summed."""
    held: set[int] = set()
    last = {stage: index for index, ((kind, stage, *_), _, _) in enumerate(timed) if kind in _MAKE_GRADIENTS}
    sizes = {stage: memory.at(stage) for stage in last}
    for index, ((kind, stage, *_), start, end) in enumerate(timed):
        if stage not in sizes:
            continue
        own = sizes[stage]
        if kind in _MAKE_GRADIENTS and stage not in held:
            held.add(stage)
            yield start, "gradients", own.gradients
        elif kind is Kind.STEP and stage in held:
            held.remove(stage)
            yield end, "gradients", -own.gradients
        if last.get(stage) == index and own.summed != own.gradients:
            yield end, "gradients", own.summed - own.gradients


def _of_versions(schedule: Schedule, rank: int, timed: list[Timed], memory: Memory) -> Iterator[Change]:
    """A step makes a version while older ones are needed; the last backward action on a version frees it."""
    before: Counter[int] = Counter()
    for index, (stage, number) in sorted(versions_after(schedule, rank).items()):
        action, start, end = timed[index]
        more = number - 1 - before[stage]
        before[stage] += more
        if more:
            yield start if action.kind is Kind.STEP else end, "weights", more * memory.at(stage).weights


def _curve(schedule: Schedule, rank: int, memory: Memory, changes: list[Change]) -> Iterator[Held]:
    now: dict[str, Number] = defaultdict(int)
    for stage in schedule.stages_of(rank):
        own = memory.at(stage)
        now["weights"] += own.weights
        now["optimizer"] += own.optimizer
    held = Held(0, *(now[part] for part in Held._fields[1:]))
    # What ends at a moment is let go before what begins at it.
    ordered = sorted(changes, key=lambda change: (change[0], change[2] > 0))
    yield held
    for (time, _), group in groupby(ordered, key=lambda change: (change[0], change[2] > 0)):
        for _, part, size in group:
            now[part] += size
        before, held = held, Held(time, *(now[part] for part in Held._fields[1:]))
        if held[1:] != before[1:]:
            yield held
