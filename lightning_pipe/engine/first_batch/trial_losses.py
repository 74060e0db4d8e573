"""The losses of some batches, run forward through all stages before anything trains; nothing else comes of it.

Whether a batch is what its micro-batches make shows where two of them run alone and together: a loss that is no mean
over samples, layers that compare samples with each other, and tensors that are cut and hold no samples all give
another loss. Layers that do so slightly hide in the rounding of a loss, so what leaves each stage is compared as well.
Stages pass on that a run has failed, so that it ends on all ranks::

                     rank 0                 rank 1
    micro-batch 0    stage 0  ----------->  stage 1: its loss
    micro-batch 1    stage 0  ----------->  stage 1: its loss
    both together    raises: the reason ->  nothing
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_pipe.engine.batch import Batch, StepFunction
from lightning_pipe.engine.boundary_exchange import BoundaryExchange
from lightning_pipe.engine.executor import Executor
from lightning_pipe.engine.first_batch.trial_runs import NotRandom, leaving_no_trace
from lightning_pipe.engine.stage import Crossings, Receive, Saved, Stages, loss_of
from lightning_pipe.errors import CutError, PartitionError, RepeatedRunError
from lightning_pipe.intercept.call_record import AGAIN, CallRecord, RunRecord
from lightning_pipe.intercept.crossing import Crossing
from lightning_pipe.intercept.random_streams import RandomStreams
from lightning_pipe.local_parts import is_divided

if TYPE_CHECKING:
    from lightning_pipe.engine.pipeline import Pipeline

_ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 5e-4, torch.bfloat16: 2e-3}
"""How far losses differ by rounding at most, relative to 1 + their size."""
_REDUCED = 5e-4
"""The same for float32 on devices that multiply matrices with fewer bits."""
_EPSILONS, TIMES = 100, 30
"""Tensors differ that are further apart than so many times what their type rounds, and than rounding has shown."""
_OTHER_WAY = "with two micro-batches together the step takes another way through its code"
_FAILED = Crossing(RunRecord((CallRecord(AGAIN, (), (), leaves=("the run has failed",)),), ()), {}, (0,))
"""What leaves a stage whose run has failed, and those behind it."""


@dataclass
class TrialLosses:
    """What has come of some runs of the step.

    Args:
        losses: of each run; less if one has failed.
        apart: how far what leaves a stage for samples together is from what leaves for each, relative to its norm, if
            by more than rounding; else 0.
        reason: why one has failed, in words.
        drew: whether one has drawn random numbers, though dropout is off.
        rounding: how far losses may differ by rounding, relative to 1 + their size.
        steps: how far apart two numbers of the loss's type lie at most, twice, relative to 1 + their size.
    """

    losses: list[float] = field(default_factory=list)
    apart: float = 0.0
    reason: str | None = None
    drew: bool = False
    rounding: float = 0.0
    steps: float = 0.0


def trial_losses(
    pipeline: Pipeline,
    step: StepFunction,
    batches: Sequence[Any],
    seed: int,
    *,
    evaluating: bool,
    together: Mapping[int, Sequence[int]] | None = None,
) -> TrialLosses:
    """Run a step forward for each of some batches, with the same random numbers. Collective over the pipeline.

    Dropout and batch norm are off. What the step changes, logs or draws is put back.

    Args:
        pipeline: the divided module.
        step: see `Pipeline.train`.
        batches: micro-batches, and some of them together.
        seed: that of the batch which they are parts of.
        evaluating: whether the whole module is as in an evaluation; layers may compute something else in training.
        together: for each batch whose tensors are compared, the batches before it that it holds. The first of these
            holds one of them twice: how far it is from that shows what rounding does, and where samples lie.

    Returns:
        What has come of it, on all ranks.
    """
    known, transport, module = pipeline.training_executor, pipeline.transport, pipeline.module
    stages, exchange = known.stages, BoundaryExchange(transport)
    trial = _Trial(stages.interceptor, stages.layers, together or {})
    executor = Executor(trial, exchange, known.placement, lambda _: None, known.skips)
    streams = RandomStreams(seed, transport.device, transport.replica, transport.topology.replicas)
    program = pipeline.program(1, pipeline.passes, training=False)
    with pipeline.running(streams):
        for number, part in enumerate(batches):
            # a signature of its own: nobody knows what will cross
            batch = Batch(step, [part], [number], [1.0], streams, training=False)
            with leaving_no_trace(stages), NotRandom(module, streams.torch, whole=evaluating) as trial.functions:
                executor.run(program, batch)
    found: list[TrialLosses] = transport.all_gather_object(trial.seen, pipeline.pipeline_members)
    return TrialLosses(
        [loss for each in found for loss in each.losses],  # of the rank with the last stage
        max(each.apart for each in found),
        next((each.reason for each in found if each.reason), None),
        any(each.drew for each in found),
        max(each.rounding for each in found),
        max(each.steps for each in found),
    )


@dataclass
class _Trial(Stages):
    """Runs the stages of this rank, and tells what comes of it. A run that fails ends on the later stages, too.

    Args:
        together: see `trial_losses`.

    Attributes:
        functions: what the run under way calls.
        seen: what has come of the runs here.
    """

    together: Mapping[int, Sequence[int]]
    functions: NotRandom = field(init=False)
    seen: TrialLosses = field(default_factory=TrialLosses)
    _left: dict[tuple[int, int, int], dict[int, Tensor]] = field(default_factory=dict)
    _noise: dict[tuple[int, int, int], float] = field(default_factory=dict)

    @override
    def forward(self, stage: int, micro_batch: int, batch: Batch, receive: Receive) -> tuple[Saved, Crossings]:
        seen, crossings = self.seen, {stage + 1: _FAILED}
        if (inbound := receive()) is None or inbound.path != _FAILED.path:
            batch.streams.seed_user_code(micro_batch)
            try:
                crossings, result = self.trial(stage, micro_batch, batch, inbound)
                if not crossings:
                    seen.losses.append(float(loss := loss_of(result)))
                    seen.rounding = max(seen.rounding, _rounding(self.interceptor.module, loss, self.functions))
                    seen.steps = max(seen.steps, 2 * torch.finfo(loss.dtype).eps)
            except (RepeatedRunError, PartitionError):
                raise
            except CutError:
                seen.reason = seen.reason or _OTHER_WAY
            except Exception as error:  # whatever a step may raise that was not made for this
                lines = str(error).strip().splitlines() or [""]
                seen.reason = seen.reason or f"two micro-batches together raise {type(error).__name__}: {lines[0]}"
            seen.drew |= batch.streams.has_drawn() or self.functions.drew
            for to, left in crossings.items():
                seen.apart = max(seen.apart, self._apart(batch.signatures[0], stage, to, left))
        return Saved(None, {}, None, set(), whole=False), crossings

    def _apart(self, run: Any, stage: int, to: int, left: Crossing) -> float:
        """How far tensors are from those of their samples, relative to their norm, if by more than rounding; else 0."""
        if any(run in parts for parts in self.together.values()):
            self._left[run, stage, to] = left.detached().tensors
        alone = [self._left.get((part, stage, to), {}) for part in self.together.get(run, ())]
        autocast, most = self.functions.autocast, 0.0
        for number, whole in left.tensors.items() if alone else ():
            key, distance = (stage, to, number), _distance(whole, [each[number] for each in alone if number in each])
            if run == min(self.together):
                self._noise[key] = distance
            elif TIMES * self._noise.get(key, inf) < distance < inf and _least(whole, autocast) < distance:
                most = max(most, distance)
        return most


def _rounding(module: nn.Module, loss: Tensor, functions: NotRandom) -> float:
    """How far losses may differ by rounding, by the coarsest numbers that take part."""
    kinds = {functions.autocast or loss.dtype, loss.dtype, *(each.dtype for each in module.parameters())}
    reduced = loss.device.type != "cpu" and torch.float32 in kinds
    return max([_REDUCED * reduced, *(_ROUNDING.get(kind, 2e-3) for kind in kinds if kind.is_floating_point)])


def _least(tensor: Tensor, autocast: torch.dtype | None) -> float:
    """How far a tensor may differ by rounding at least, relative to its norm, by the coarsest numbers behind it."""
    epsilon = max(torch.finfo(kind).eps for kind in (tensor.dtype, autocast or tensor.dtype))
    return max(_EPSILONS * epsilon, _ROUNDING[torch.float64], _REDUCED * (tensor.device.type != "cpu"))


def _distance(whole: Tensor, parts: Sequence[Tensor]) -> float:
    """How far a tensor is from parts that follow each other in it, relative to their norm; else infinite."""
    compared = parts if whole.is_floating_point() and not is_divided(whole) else ()
    found = [float((whole - joined).norm() / joined.norm()) for joined in _orders(compared, whole.shape)]
    return min(filter(isfinite, found), default=inf)


def _orders(parts: Sequence[Tensor], shape: torch.Size) -> Iterator[Tensor]:
    """Parts in a row; then as if each held several views of its samples (``torch.cat([x, y])``), view by view."""
    for dimension in range(len(shape) if parts else 0):
        with suppress(RuntimeError):  # they have other shapes
            fits = torch.cat([*parts], dimension).shape == shape
            for views in range(1, fits * parts[0].shape[dimension] + 1):
                if not any(part.shape[dimension] % views for part in parts):
                    rows = zip(*(part.chunk(views, dimension) for part in parts), strict=True)
                    yield torch.cat([piece for row in rows for piece in row], dimension).double()
