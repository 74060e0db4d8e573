"""The losses of some batches, run forward through all stages before anything trains; nothing else comes of it.

Whether a batch is what its micro-batches make shows where two of them run alone and together: a loss that is no mean
over samples, layers that compare samples with each other, and tensors that are cut and hold no samples all give
another loss. Layers that do so slightly hide in the rounding of a loss, so what leaves each stage is compared as well.
Stages pass on why a run has failed, so that it ends on all ranks::

                     rank 0             rank 1
    micro-batch 0    stage 0  ------->  stage 1: its loss
    micro-batch 1    stage 0  ------->  stage 1: its loss
    both together    raises   ------->  the reason
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipe.engine.batch import Batch, StepFunction
from lightning_pipe.engine.executor import Executor
from lightning_pipe.engine.first_batch.trial_runs import NotRandom, leaving_no_trace, not_random, put_back
from lightning_pipe.engine.stage import loss_of
from lightning_pipe.engine.under_way import BoundaryKey
from lightning_pipe.errors import CutError, RepeatedRunError
from lightning_pipe.intercept.crossing import Crossing
from lightning_pipe.intercept.random_streams import RandomStreams
from lightning_pipe.local_parts import is_divided
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.work import Work

if TYPE_CHECKING:
    from lightning_pipe.engine.pipeline import Pipeline

_ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 5e-4, torch.bfloat16: 2e-3}
"""How far losses differ by rounding at most, relative to 1 + their size."""
_REDUCED = 5e-4
"""The same for float32 on devices that multiply matrices with fewer bits."""
_EPSILONS, TIMES = 100, 30
"""Tensors differ that are further apart than so many times what their type rounds, and than rounding has shown."""


class TrialLosses(NamedTuple):
    """What has come of some runs of the step.

    Args:
        losses: of each run; less if one has failed.
        apart: how far what leaves a stage for samples together is from what leaves for each, relative to its norm, if
            by more than rounding; else 0.
        reason: why one has failed, in words.
        drew: whether one has drawn random numbers, though dropout is off.
        rounding: how far losses may differ by rounding, relative to 1 + their size.
    """

    losses: list[float]
    apart: float
    reason: str | None
    drew: bool
    rounding: float


class _Passed(NamedTuple):
    """What a run leaves between two stages: values, why it has failed, or behind the last one the loss."""

    crossing: Crossing | None
    loss: Tensor | None
    apart: float
    reason: str | None
    drew: bool


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
    executor, transport = pipeline.training_executor, pipeline.transport
    last = len(executor.stages.layers) - 1
    streams = RandomStreams(seed, transport.device, transport.replica, transport.topology.replicas)
    mail, seen = _Mail(transport), TrialLosses([], 0.0, None, drew=False, rounding=0.0)
    comparison = _Comparison(together or {})
    with pipeline.running(streams), leaving_no_trace():
        for number, part in enumerate(batches):
            batch = Batch(step, [part], [0], [1.0], streams, training=False)
            with put_back(executor.stages), not_random(pipeline.module, streams.state, whole=evaluating) as functions:
                ended = _run(executor, mail, batch, functions, partial(comparison.apart, number))
            if ended is not None:
                losses, rounding = seen.losses, seen.rounding
                if ended.loss is not None:
                    losses = [*losses, float(ended.loss)]
                    rounding = max(rounding, _rounding(pipeline.module, ended.loss, functions.autocast))
                apart, reason = max(seen.apart, ended.apart), seen.reason or ended.reason
                seen = TrialLosses(losses, apart, reason, seen.drew or ended.drew, rounding)
    mail.wait()
    source = transport.peers[executor.placement[0, last]]
    told: TrialLosses = transport.broadcast_object(seen, source, pipeline.pipeline_members)
    return told


def _run(
    executor: Executor,
    mail: _Mail,
    batch: Batch,
    functions: NotRandom,
    apart: Callable[[BoundaryKey, _Passed, NotRandom], float],
) -> _Passed | None:
    """Run a batch through the stages of this rank; returns what it ends with behind the last stage."""
    ended = None
    for stage, layers in enumerate(executor.stages.layers):
        if executor.placement[0, stage] != executor.rank:
            continue
        earlier, placement = executor.earlier[stage], executor.placement
        came = [mail.receive(BoundaryKey(0, early, 0, stage), placement[0, early]) for early in earlier]
        left = _computed(executor, stage, batch, came, functions)
        for to, one in left.items():
            key = BoundaryKey(0, stage, 0, to)
            passed = one._replace(apart=max(one.apart, apart(key, one, functions)))
            if layers.last:
                ended = passed
            else:
                mail.send(key, passed, placement[0, to])
    return ended


def _computed(
    executor: Executor, stage: int, batch: Batch, came: Sequence[_Passed], functions: NotRandom
) -> dict[int, _Passed]:
    """What a stage leaves for each later one, and the last one for itself."""
    reason = next((each.reason for each in came if each.reason), None)
    crossings: dict[int, Crossing] = {}
    loss, drew, apart = None, any(each.drew for each in came), max((each.apart for each in came), default=0.0)
    if reason is None:
        inbound = None
        for crossing in (each.crossing for each in came):
            inbound = crossing if inbound is None or crossing is None else inbound.joined(crossing)
        batch.streams.seed_user_code(0)
        before = batch.streams.state()
        try:
            crossings, result = executor.stages.trial(stage, 0, batch, inbound)
            loss = None if crossings else loss_of(result)
        except RepeatedRunError:
            raise
        except CutError:
            reason = "with two micro-batches together the step takes another way through its code"
        except Exception as error:  # whatever a step may raise that was not made for this
            lines = str(error).strip().splitlines() or [""]
            reason = f"two micro-batches together raise {type(error).__name__}: {lines[0]}"
        drew = drew or functions.drew or batch.streams.state() != before
    none = next(iter(crossings.values())).emptied() if crossings else None
    receivers = executor.later[stage] or [stage]
    return {to: _Passed(crossings.get(to, none), loss, apart, reason, drew) for to in receivers}


def _rounding(module: nn.Module, loss: Tensor, autocast: torch.dtype | None) -> float:
    """How far losses may differ by rounding, by the coarsest numbers that take part."""
    dtypes = {each.dtype for each in (loss, *module.parameters()) if each.is_floating_point()}
    reduced = loss.device.type != "cpu" and torch.float32 in dtypes
    return max([_REDUCED * reduced, *(_ROUNDING.get(kind, 2e-3) for kind in {*dtypes, autocast or loss.dtype})])


@contextmanager
def parameters_whole(pipeline: Pipeline) -> Iterator[None]:
    """Parameters are whole meanwhile that replicas divide. Collective over these."""
    sharded = pipeline.reductions.sharded
    if sharded is None:
        yield
        return
    sharded.hold(True)
    try:
        yield
    finally:
        sharded.hold(False)


@dataclass
class _Comparison:
    """Compares what leaves the stages of this rank for samples together with what has left for each.

    Args:
        together: see `trial_losses`.
    """

    together: Mapping[int, Sequence[int]]
    _left: dict[tuple[int, BoundaryKey], dict[int, Tensor]] = field(default_factory=dict)
    _noise: dict[tuple[BoundaryKey, int], float] = field(default_factory=dict)

    def apart(self, run: int, boundary: BoundaryKey, passed: _Passed, functions: NotRandom) -> float:
        """How far tensors are from those of their samples, relative to their norm, if by more than rounding; else 0."""
        if passed.crossing is None:
            return 0.0
        if any(run in parts for parts in self.together.values()):
            self._left[run, boundary] = passed.crossing.detached().tensors
        alone, most = [self._left.get((part, boundary), {}) for part in self.together.get(run, ())], 0.0
        for number, whole in passed.crossing.tensors.items() if alone else ():
            key, distance = (boundary, number), _distance(whole, [each[number] for each in alone if number in each])
            if run == min(self.together):
                self._noise[key] = distance
            elif TIMES * self._noise.get(key, inf) < distance < inf and _least(whole, functions.autocast) < distance:
                most = max(most, distance)
        return most


def _least(tensor: Tensor, autocast: torch.dtype | None) -> float:
    """How far a tensor may differ by rounding at least, relative to its norm, by the coarsest numbers behind it."""
    epsilon = max(torch.finfo(kind).eps for kind in (tensor.dtype, autocast or tensor.dtype))
    return max(_EPSILONS * epsilon, _ROUNDING[torch.float64], _REDUCED * (tensor.device.type != "cpu"))


def _distance(whole: Tensor, parts: Sequence[Tensor]) -> float:
    """How far a tensor is from parts that follow each other in it, relative to their norm; else infinite."""
    if parts and whole.is_floating_point() and not is_divided(whole):
        for dimension in range(whole.dim()):
            with suppress(RuntimeError):  # they have other shapes
                joined = torch.cat([*parts], dimension).double()
                if joined.shape == whole.shape:
                    found = float((whole.double() - joined).norm() / joined.norm())
                    return found if isfinite(found) else inf
    return inf


@dataclass
class _Mail:
    """Brings what runs leave to later stages, on this rank or another one."""

    transport: Transport
    _here: dict[BoundaryKey, _Passed] = field(default_factory=dict)
    _sending: list[Work] = field(default_factory=list)

    def send(self, key: BoundaryKey, passed: _Passed, rank: int) -> None:
        """Start to send to a rank."""
        passed = passed._replace(crossing=passed.crossing and passed.crossing.detached())
        if rank == self.transport.rank:
            self._here[key] = passed
        else:
            self._sending.append(self.transport.send_object(passed, rank, key.tag(0)))

    def receive(self, key: BoundaryKey, rank: int) -> _Passed:
        """What comes from a rank."""
        if rank == self.transport.rank:
            return self._here.pop(key)
        passed: _Passed = self.transport.receive_object(rank, key.tag(0))
        return passed._replace(crossing=passed.crossing and passed.crossing.laid_out())

    def wait(self) -> None:
        """Wait for all that is being sent."""
        for work in self._sending:
            work.wait()
