"""The order of a training step that runs the layers several times: the stages of all passes follow each other."""

from __future__ import annotations

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.schedules.action import Action, Kind, Placement
from lightning_pipe.schedules.families.interleaved import Interleaved
from lightning_pipe.schedules.family import schedule_of
from lightning_pipe.schedules.ir import Schedule


def several_passes(schedule: Schedule, passes: int) -> Schedule:
    """The schedule of several passes over the stages of a schedule: as many stages more, on the same ranks.

    Stages in a loop are ordered as in interleaved 1F1B, which has the same dependencies, except under ``gpipe``. All
    other orders have all forward passes first.
    Source: Megatron-LM, arXiv:2104.04473v5, section 2.2.

    Args:
        schedule: of one pass, without recomputation.
        passes: how often a training step runs the layers.

    Raises:
        ConfigurationError: it divides backward passes, has several pipes or leaves batches in flight.

    Example:
        >>> from lightning_pipe.schedules import OneFOneB
        >>> twice = several_passes(OneFOneB().build(ranks=2, micro_batches=4), 2)
        >>> twice.stages, twice.stages_of(0)
        (4, (0, 2))
    """
    if passes == 1:
        return schedule
    if not may_repeat(schedule):
        raise ConfigurationError(
            f"Schedule {schedule.name!r} cannot train with passes={passes}.",
            hint="Use 'gpipe', '1f1b' or 'interleaved': one pipe, whole backward passes, a flush.",
        )
    ranks, micro_batches = schedule.ranks, schedule.micro_batches
    stages = passes * schedule.stages
    placement = {(0, stage): schedule.placement[0, stage % schedule.stages] for stage in range(stages)}
    looped = all(rank == stage % ranks for (_, stage), rank in placement.items())
    if looped and schedule.name != "gpipe":
        return Interleaved(stages // ranks).build(ranks, micro_batches, stages=stages)
    order = _one_by_one(placement, ranks, micro_batches)
    made = schedule_of(schedule.name, order, placement=placement, micro_batches=micro_batches)
    made.validate()
    return made


def may_repeat(schedule: Schedule) -> bool:
    """Whether there is an order of several passes: one pipe, whole backward passes, a flush."""
    kinds = {action.kind for order in schedule.actions for action in order}
    return kinds <= {Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD} and schedule.pipes == 1 and schedule.synchronous


def _one_by_one(placement: Placement, ranks: int, micro_batches: int) -> list[list[Action]]:
    """All forward passes, stage by stage, then all backward passes in reverse: right for every placement."""
    pairs = [(stage, index) for stage in range(len(placement)) for index in range(micro_batches)]
    actions = [Action(Kind.FORWARD, *pair) for pair in pairs]
    actions += [Action(Kind.BACKWARD, *pair) for pair in reversed(pairs)]
    return [[action for action in actions if placement[0, action.stage] == rank] for rank in range(ranks)]
