"""What a run tells its user: the plan before the first batch, and after the last one what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
from torch import nn

from lightning_pipe.config import BatchEquation, RunLayout
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import places_by_stage
from lightning_pipe.planning.make import predicted_bubble, stage_plans
from lightning_pipe.planning.render import Plan, closing_line, plan_text
from lightning_pipe.trainer.data.micro_batches import MicroBatches


def plan_of(
    module: nn.Module,
    pipeline: Pipeline,
    layout: RunLayout,
    batch: BatchEquation | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The plan of a divided module.

    Where parameters outside the layers will be held is told from the order in which modules are registered; memory is
    that of weights, gradients and two optimizer moments.

    Args:
        module: the module.
        pipeline: the module over the ranks.
        layout: sizes of pipelines and replicas.
        batch: the first batch.
        notes: further lines.
    """
    held = places_by_stage(module, pipeline.layers, pipeline.balance)
    named = [tuple(pipeline.names[number] for number in pipeline.stage_layers[stage]) for stage in range(len(held))]
    seen: dict[str, list[int]] = {}
    for stage, own in enumerate(held):
        for one in own:
            seen.setdefault(one.name, []).append(stage)
    ties = tuple((name, tuple(on)) for name, on in seen.items() if len(on) > 1)
    label, bubble = pipeline.family.label, None
    if batch is not None:
        flow = None if pipeline.flow is None else pipeline.flow.stream
        bubble = predicted_bubble(pipeline.schedule, batch.micro_batches, flow)
    stages = stage_plans(named, held, pipeline.placement, pipeline.transport.topology)
    return Plan(type(module).__name__, stages, layout, label, batch, bubble, ties, notes=notes)


def no_mean(sizes: Sequence[int], mean: float, both: float) -> str:
    """The warning for a loss that is not the mean over samples.

    Args:
        sizes: samples of two micro-batches.
        mean: of their losses, weighted by samples.
        both: the loss of the two together.
    """
    return (
        f"The loss is not a mean over the samples: micro-batches of {sizes[0]} and {sizes[1]} samples have a mean loss "
        f"of {mean:.7g}, the same samples together have {both:.7g} (without dropout). Gradients differ "
        "accordingly from those of one device. For a mean over something else than samples say what a micro-batch "
        "counts, such as PipeStrategy(loss_weight=lambda micro_batch: (micro_batch['labels'] != -100).sum()), where a "
        "causal model leaves out labels[:, 0]. A sum needs PipeStrategy(loss_weight='sum'). A loss that compares "
        "samples with each other needs micro_batches=1. Samples that do not lie along the first dimension need "
        "PipeStrategy(split_batch=…)."
    )


def no_sum(sizes: Sequence[int], total: float, both: float) -> str:
    """The warning for a loss that is not the sum over samples, though it was said to be."""
    return (
        f"The loss is not a sum over the samples, as loss_weight='sum' says: the losses of micro-batches of {sizes[0]} "
        f"and {sizes[1]} samples add up to {total:.7g}, the same samples together have {both:.7g} (without dropout). "
        "Gradients differ accordingly from those of one device. For a mean leave loss_weight out, or say what a "
        "micro-batch counts."
    )


def unchecked(reason: str, *, summed: bool) -> str:
    """The warning for a loss of which it cannot be told whether the losses of micro-batches make it up."""
    return (
        f"It was not checked whether the loss is a {'sum' if summed else 'mean'} over the samples: {reason}. If it is "
        "one, and every tensor with the length of the batch holds one entry for each sample, all is well; with "
        "PipeStrategy(loss_weight=lambda micro_batch: …), which says what a micro-batch counts, nothing is checked."
    )


@dataclass
class Report:
    """Tells the plan of a training run and its end, on rank 0.

    Args:
        module: the LightningModule.
        pipeline: the module over the ranks.
        layout: sizes of pipelines and replicas.
        notes: further lines of the plan.
    """

    module: pl.LightningModule
    pipeline: Pipeline
    layout: RunLayout
    notes: tuple[str, ...] = ()
    _bubble: float | None = None
    _announced: bool = False
    _batches: int = 0
    _samples: int = 0

    def batch(self, cut: MicroBatches) -> None:
        """Note a training batch; the first one completes the plan, which is told."""
        if not self._announced:
            self._announced = True
            accumulation = self.module.trainer.accumulate_grad_batches
            equation = BatchEquation(sum(cut.sizes), len(cut.parts), self.layout.data_parallel_size, accumulation)
            plan = plan_of(self.module, self.pipeline, self.layout, equation, self.notes)
            self._bubble = plan.bubble
            self.module.print(plan_text(plan))
            return
        # The first batch also agrees on what travels: it is no measure.
        self._batches += 1
        self._samples += sum(cut.sizes)

    def end(self) -> None:
        """Tell what was measured. Collective over the pipeline."""
        transport = self.pipeline.transport
        mine = (self.pipeline.busy, self.pipeline.elapsed)
        times = transport.all_gather_object(mine, self.pipeline.pipeline_members)
        elapsed = max(elapsed for _, elapsed in times)
        if not self._batches or not elapsed:
            return
        # A GPU computes when the host has long gone on: no bubble can be told from the host's clock.
        measured = (
            1 - sum(busy for busy, _ in times) / (elapsed * len(times)) if transport.device.type == "cpu" else None
        )
        samples = self._samples * self.layout.data_parallel_size
        if self.module.trainer.is_global_zero:
            # not by the progress bar, which is closed by now and drops what it is given
            print(closing_line(self._batches, elapsed, samples, self._bubble, measured))
