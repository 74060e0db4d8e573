"""Callbacks for runs in a pipeline."""

from __future__ import annotations

from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.simulate import Costs, Event, Timeline, simulate


class PipelineTimeline(pl.Callback):
    """Draws what every rank really did in one training batch: who computed what when, the bubble ratio in the title.

    Does nothing without a pipeline. Right for the ranks of one host, whose clocks agree.

    Args:
        path: the picture; its ending says the format (png, svg, pdf). ``None``: no picture, see ``timeline``.
        batch: the batch to draw, counted from where the run starts or resumes; the first ones are slower than the
            others. A shorter run shows its last one.

    Attributes:
        timeline: what was measured, on rank 0 after the training.
        predicted: the simulated timeline of the same schedule with equal stages and backward passes twice as long as
            forward passes.

    Raises:
        ValueError: at the end of training, if the picture's format is not known.

    Example:
        >>> import lightning as L
        >>> timeline = PipelineTimeline("timeline.png", batch=50)
        >>> trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=[timeline])
    """

    def __init__(self, path: str | PathLike[str] | None = None, batch: int = 20) -> None:
        self.path = None if path is None else Path(path)
        self.batch = batch
        self.timeline: Timeline | None = None
        self.predicted: Timeline | None = None
        self._events: list[Event] = []
        self._recording = ExitStack()
        self._batches = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._batches = 0

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        pipeline = _pipeline_of(trainer)
        if pipeline is not None and self._batches <= self.batch:
            self._events = self._recording.enter_context(pipeline.recorded())

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._recording.close()
        self._batches += 1

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._recording.close()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pipeline = _pipeline_of(trainer)
        if pipeline is None or not self._events:
            return
        timeline = pipeline.timeline(self._events)
        self._events = []
        if not trainer.is_global_zero:
            return
        self.timeline = timeline
        micro_batches = len({event.micro_batch for event in timeline.events})
        self.predicted = simulate(pipeline.schedule(micro_batches), Costs())
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            timeline.plot(self.path)


def _pipeline_of(trainer: pl.Trainer) -> Pipeline | None:
    pipeline = getattr(trainer.strategy, "pipeline", None)
    return pipeline if isinstance(pipeline, Pipeline) else None
