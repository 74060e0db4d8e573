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
from lightning_pipe.engine.stage import Stages
from lightning_pipe.intercept.stage_layers import StageLayers
from lightning_pipe.schedules import Action, Schedule, lower
from lightning_pipe.schedules.passes.recompute import with_recompute
from lightning_pipe.schedules.several_passes import several_passes

if TYPE_CHECKING:
    from lightning_pipe.engine.pipeline import Pipeline


class Passes:
    """Runs training steps of several passes.

    Args:
        pipeline: the module over the ranks.
        count: the number of passes.
        executor: that of steps of one pass.
    """

    def __init__(self, pipeline: Pipeline, count: int, executor: Executor) -> None:
        self._pipeline, self._stages, self._count = pipeline, len(pipeline.stage_layers), count
        layers, ranks = len(pipeline.names), pipeline.transport.topology.ranks
        stage_of = [stage for stage, span in enumerate(pipeline.stage_layers) for _ in span]
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
            self.schedule(2 * ranks).placement,
            executor.rank,
            self._reduce,
        )
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
        pipeline = self._pipeline
        ranks, stages = pipeline.transport.topology.ranks, len(pipeline.balance)
        one = pipeline.family.build(ranks, micro_batches, stages=stages)
        return with_recompute(several_passes(one, self._count), pipeline.recompute)
