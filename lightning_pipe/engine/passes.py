"""Training steps that run the layers several times: the stages of all passes follow each other.

Two passes over two stages are four stages in a row, of which each rank has two with the same weights::

                    rank 0        rank 1
    first pass      stage 0  -->  stage 1  --.
                   .-------------------------'
    second pass    '->  stage 2  -->  stage 3 --> loss

Whether the second pass needs the first one (recursion) or not (two views of a sample), what it leaves behind goes on
through the stages of the second one. The order is that of interleaved 1F1B, which has the same dependencies.
Source: Megatron-LM, arXiv:2104.04473v5, section 2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_pipe.engine.boundary_exchange import BoundaryExchange
from lightning_pipe.engine.connections import connect_program
from lightning_pipe.engine.executor import Executor
from lightning_pipe.engine.skip_routes import SkipRoutes
from lightning_pipe.engine.stage import Stages
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.stage_layers import StageLayers
from lightning_pipe.schedules import Action, Kind, Schedule, lower
from lightning_pipe.schedules.families.interleaved import Interleaved
from lightning_pipe.schedules.family import schedule_of
from lightning_pipe.schedules.passes.recompute import with_recompute

if TYPE_CHECKING:
    from lightning_pipe.engine.pipeline import Pipeline


def check_family(schedule: Schedule, passes: int) -> None:
    """Raise if a schedule cannot run several passes.

    Args:
        schedule: any schedule of the family, for one pass.
        passes: how often a training step runs the layers.

    Raises:
        ConfigurationError: it divides backward passes, has several pipes or leaves batches in flight.
    """
    kinds = {action.kind for order in schedule.actions for action in order}
    whole = kinds <= {Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD}
    if not whole or schedule.pipes > 1 or not schedule.synchronous:
        raise ConfigurationError(
            f"Schedule {schedule.name!r} cannot train with passes={passes}.",
            hint="Use 'gpipe', '1f1b' or 'interleaved': one pipe, whole backward passes, a flush.",
        )


class Passes:
    """Runs training steps of several passes.

    Args:
        pipeline: the module over the ranks.
        count: the number of passes.
        executor: that of steps of one pass.
    """

    def __init__(self, pipeline: Pipeline, count: int, executor: Executor) -> None:
        check_family(pipeline.sample_schedule(), count)
        self._pipeline, self._stages = pipeline, len(pipeline.stage_layers)
        layers, ranks = len(pipeline.names), pipeline.transport.topology.ranks
        stage_of = [stage for stage, span in enumerate(pipeline.stage_layers) for _ in span]
        self._placement = {
            (0, number * self._stages + stage): pipeline.placement[0, stage]
            for number in range(count)
            for stage in range(self._stages)
        }
        stages = [
            StageLayers(
                number * self._stages + stage,
                range(number * layers + span.start, number * layers + span.stop),
                pipeline.names * count,
                {},
                stage_of,
            )
            for number in range(count)
            for stage, span in enumerate(pipeline.stage_layers)
        ]
        known = executor.stages
        self.executor = Executor(
            Stages(known.interceptor, stages, known.parameter_use, known.device, known.buffers),
            # Its plans name stages of all passes: they must not meet those of an evaluation, which has one pass.
            BoundaryExchange(pipeline.transport),
            self._placement,
            executor.rank,
            self._reduce,
        )
        none = SkipRoutes(pipeline.module, [], [])
        self.executor.connect(none)
        connect_program(pipeline.transport, lower(self.schedule(2 * ranks), []))

    def _reduce(self, stage: int) -> None:
        """The gradients of a stage are complete when its first pass has had its backward passes: they come last."""
        if stage < self._stages:
            self._pipeline.reductions.stage_done(stage)

    def program(self, micro_batches: int) -> tuple[Action, ...]:
        """What this rank does for a batch."""
        return lower(self.schedule(micro_batches), [])[self.executor.rank]

    def schedule(self, micro_batches: int) -> Schedule:
        """The order of a batch."""
        ranks, name = self._pipeline.transport.topology.ranks, self._pipeline.family.name
        stages = len(self._placement)
        looped = all(rank == stage % ranks for (_, stage), rank in self._placement.items())
        if looped and name != "gpipe":
            schedule = Interleaved(stages // ranks).build(ranks, micro_batches, stages=stages)
        else:
            schedule = schedule_of(
                name, self._one_by_one(micro_batches), placement=self._placement, micro_batches=micro_batches
            )
            schedule.validate()
        return with_recompute(schedule, self._pipeline.recompute)

    def _one_by_one(self, micro_batches: int) -> list[list[Action]]:
        """All forward passes, stage by stage, then all backward passes in reverse: right for every placement."""
        pairs = [(stage, index) for stage in range(len(self._placement)) for index in range(micro_batches)]
        actions = [Action(Kind.FORWARD, *pair) for pair in pairs]
        actions += [Action(Kind.BACKWARD, *pair) for pair in reversed(pairs)]
        return [
            [action for action in actions if self._placement[0, action.stage] == rank]
            for rank in range(self._pipeline.transport.topology.ranks)
        ]
