"""What a run prints for its user: the plan in the first batch, and the measured speed after the last one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_pipe.batches.micro_batches import MicroBatches
from lightning_pipe.config import BatchEquation
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.planning.batch_norms import norms_note
from lightning_pipe.planning.division import Division
from lightning_pipe.planning.make import assembled, label_of, predicted_bubble
from lightning_pipe.planning.render import Plan, closing_line, plan_text
from lightning_pipe.simulate import Costs

if TYPE_CHECKING:
    from lightning_pipe.trainer.strategy import PipeStrategy


@dataclass
class Report:
    """Prints the plan of a training run and its closing line, on process 0.

    Args:
        module: the LightningModule.
        pipeline: the module over the ranks.
        notes: further lines of the plan.
        costs: of the stages, if they have been measured.
        built: bytes of parameters that every process has built whole.
    """

    module: pl.LightningModule
    pipeline: Pipeline
    notes: tuple[str, ...] = ()
    costs: Costs | None = None
    built: int = 0
    _batches: int = 0
    _samples: int = 0
    _plan: Plan | None = None

    def batch(self, micro_batches: MicroBatches, *, chosen: bool) -> None:
        """Note a training batch; the first one completes the plan, which is printed.

        Args:
            micro_batches: the batch.
            chosen: whether ``micro_batches="auto"`` has chosen their number.
        """
        if self._plan is None:
            accumulation, topology = self.module.trainer.accumulate_grad_batches, self.pipeline.transport.topology
            sizes, ranks, side_by_side = micro_batches.sizes, topology.ranks, topology.replicas
            equation = BatchEquation(sum(sizes), len(sizes), side_by_side, accumulation)
            of_norms = norms_note(self.module, sizes, ranks, self._bubble, chosen)
            for line in of_norms if chosen else ():
                rank_zero_warn(line)
            uncut = (micro_batches.uncut,) if micro_batches.uncut else ()
            # steps may divide their batch by these two
            counts = (
                f"trainer.num_devices counts the {self.module.trainer.num_devices} ranks of this machine; batches side "
                f"by side: trainer.strategy.num_processes={side_by_side}"
            )
            notes = (*([counts] if ranks > 1 else []), *uncut, *of_norms)
            self._plan = self._announce(equation, notes)
            return
        # in the first batch the ranks also agree on what they send: its time is no measure
        self._batches += 1
        self._samples += sum(micro_batches.sizes)

    def _bubble(self, micro_batches: int) -> float:
        # of a training batch, with the stages of all passes
        return predicted_bubble(self.pipeline.schedule, micro_batches, self.costs)

    def _announce(self, batch: BatchEquation, notes: tuple[str, ...]) -> Plan:
        """Print the plan, with the schedule of the first batch. Collective over the pipeline."""
        pipeline, strategy = self.pipeline, cast("PipeStrategy", self.module.trainer.strategy)
        division = Division.of_run(self.module, strategy.shard_optimizer)
        if pipeline.transport.topology.tensor > 1 or strategy.shard_optimizer == "parameters":
            # each rank knows how the parameters of its own stages are divided
            division = Division.of_all(pipeline.transport.all_gather_object(division, pipeline.pipeline_members))
        made = assembled(
            self.module,
            pipeline.layers,
            pipeline.balance,
            pipeline.placement,
            pipeline.transport.topology,
            label_of(pipeline.family, pipeline.passes),
            batch,
            division=division,
            on_device=pipeline.transport.device.type != "cpu",
            built=self.built,
        )
        plan = replace(made, bubble=self._bubble(batch.micro_batches), notes=(*self.notes, *notes, *made.notes))
        if self.module.trainer.is_global_zero:  # to draw its tables takes longer than a small batch
            bar = self.module.trainer.progress_bar_callback  # `module.print` asks it for what bars need not have
            (self.module.print if bar is None or hasattr(bar, "is_enabled") else print)(plan_text(plan))
        return plan

    def end(self) -> None:
        """Print what was measured. Collective over the pipeline."""
        transport = self.pipeline.transport
        mine = (self.pipeline.busy, self.pipeline.elapsed)
        times = transport.all_gather_object(mine, self.pipeline.pipeline_members)
        elapsed = max(elapsed for _, elapsed in times)
        if not self._batches or not elapsed:
            return
        # a GPU computes when the host has long gone on: the host's clock shows no bubble
        measured = (
            1 - sum(busy for busy, _ in times) / (elapsed * len(times)) if transport.device.type == "cpu" else None
        )
        samples = self._samples * transport.topology.replicas
        if self.module.trainer.is_global_zero:
            # not by the progress bar, which is closed by now and drops what it is given
            predicted = None if self._plan is None else self._plan.bubble
            print(closing_line(self._batches, elapsed, samples, predicted, measured))
