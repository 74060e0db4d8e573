"""One stage on one micro-batch: forward through the user's step, backward through what it left."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.engine.containers import fresh
from lightning_pipe.engine.first_batch.loss_check import LossCheck
from lightning_pipe.engine.split_backward import SplitBackward
from lightning_pipe.errors import ConfigurationError, CutError
from lightning_pipe.intercept.call_record import CallRecord, Crossing, RunRecord
from lightning_pipe.intercept.incoming import Incoming
from lightning_pipe.intercept.interceptor import Interceptor
from lightning_pipe.intercept.layer_calls import Profiler
from lightning_pipe.intercept.random_streams import RandomStreams
from lightning_pipe.intercept.recompute import BufferGuard, Buffers, nothing_saved, recomputing
from lightning_pipe.intercept.stage_layers import StageLayers
from lightning_pipe.intercept.stage_run import NO_SKIPPING, StageRun
from lightning_pipe.parameters.deferred_batchnorm import forward_pass
from lightning_pipe.parameters.ownership import Ownership
from lightning_pipe.skip import SkipEvent, SkipKey
from lightning_pipe.torch_internals import tree_leaves, tree_map

StepFunction = Callable[[int, Any], Any]
Inbound = tuple[RunRecord, dict[int, Tensor]]
Crossings = dict[int, Crossing]
"""What leaves a stage, by the stage that receives it; nothing leaves the last one."""


_AS_THEY_ARE = nullcontext()


@dataclass
class Batch:
    """What one batch brings to the engine.

    Args:
        step: ``step(index, micro_batch)`` runs the user's step; its value counts on the stage with the loss alone.
        micro_batches: the slices of the batch.
        keys: a signature for each of them: equal signatures, equal shapes.
        weights: the factor of each micro-batch's loss.
        streams: the batch's random streams.
        training: whether gradients are wanted.
        alone: whether no other micro-batch is under way meanwhile, which could read what this one changes.
        check: looks once whether the loss is a mean over samples; ``None``: it is not looked at.
        using: ``using(micro_batch)`` is entered around computations, to put the weights that they use in place.
        results: what the step returned for each micro-batch, detached, where the loss is.
        constant: the micro-batches whose loss depends on nothing that is trained.
    """

    step: StepFunction
    micro_batches: Sequence[Any]
    keys: Sequence[Hashable]
    weights: Sequence[float]
    streams: RandomStreams
    training: bool
    alone: bool = False
    check: LossCheck | None = None
    using: Callable[[int], AbstractContextManager[None]] = lambda _: _AS_THEY_ARE
    results: dict[int, Any] = field(default_factory=dict)
    constant: set[int] = field(default_factory=set)

    def keep(self, micro_batch: int, saved: Saved, result: Any) -> None:
        """Keep what the step returned.

        Raises:
            ConfigurationError: no loss of the batch depends on anything that is trained. One micro-batch's need not.
        """
        self.results[micro_batch] = _detached(result)
        if saved.loss is None or saved.loss.requires_grad:
            return
        self.constant.add(micro_batch)
        if len(self.constant) == len(self.micro_batches):
            raise ConfigurationError(
                "The loss depends on no parameter that is trained: there are no gradients.",
                hint="Return it as it was computed, not from detach(), item() or torch.no_grad(); look at which "
                "parameters require gradients.",
            )

    def slice(self, micro_batch: int) -> Any:
        """A micro-batch for one run: the step may change it, and nothing else shares its memory."""
        return fresh(self.micro_batches[micro_batch])


@dataclass
class Saved:
    """What a forward pass leaves for its backward pass.

    Args:
        inbox: the entry of the received tensors into the graph.
        inbound: the numbers of the received tensors that need gradients.
        outbound: by number, the tensors that left and need gradients.
        loss: the weighted loss, on the last stage.
        used: the numbers of the received tensors that were used.
        whole: whether the backward pass cannot be divided into halves.
        split: the backward pass between its two halves.
    """

    inbox: Incoming | None
    inbound: tuple[int, ...]
    outbound: dict[int, Tensor]
    loss: Tensor | None
    used: set[int]
    whole: bool
    split: SplitBackward | None = None

    def returned(self) -> dict[int, Tensor]:
        """By number, the gradients of what was received, once the backward pass has run."""
        if self.inbox is None:
            return {}
        self.inbox.check_hooks()
        pairs = zip(self.inbound, self.inbox.gradients, strict=True)
        return {number: gradient for number, gradient in pairs if gradient is not None}


@dataclass
class Kept:
    """What a forward pass leaves that will run again: its input, and the calls it made up to the cut.

    ``buffers`` has the former values of those that it changed.
    """

    inbound: Inbound | None
    calls: tuple[CallRecord, ...] | None
    buffers: Buffers


@dataclass
class Stages:
    """Runs the stages of one rank.

    Args:
        interceptor: stands between the user's step and the layers.
        layers: for each stage its range of layers.
        names: dotted names of all layers.
        ownership: who holds which parameter.
        device: the rank's device.
        buffers: puts buffers back that a second run changes.
        routes: for each stage the skip connections that go from it past the next one, with the stage they go to.
        profiler: measures layers as they are called; ``None``: no measurement.
        called: the layers that have been called so far.
        skipped: by stage, what its layers stashed and popped in their last run.
    """

    interceptor: Interceptor
    layers: Sequence[range]
    names: Sequence[str]
    ownership: Ownership
    device: torch.device
    buffers: BufferGuard
    routes: Mapping[int, Mapping[SkipKey, int]] = field(default_factory=dict)
    profiler: Profiler | None = None
    called: set[int] = field(default_factory=set)
    skipped: dict[int, list[SkipEvent]] = field(default_factory=dict)

    def forward(self, stage: int, micro_batch: int, batch: Batch, inbound: Inbound | None) -> tuple[Saved, Crossings]:
        """Run the step for one stage. Returns what backward needs and, by receiving stage, what leaves."""
        self._look(stage, micro_batch, batch, inbound)
        saved, crossings, result = self._run(stage, micro_batch, batch, inbound)
        if not crossings:
            batch.keep(micro_batch, saved, result)
        return saved, crossings

    def forward_again(
        self, stage: int, micro_batch: int, batch: Batch, inbound: Inbound | None
    ) -> tuple[Kept, Crossings]:
        """Run the step for one stage, to be run again by `recompute`: keep the input alone."""
        self._look(stage, micro_batch, batch, inbound)
        # The first run may change what it received; the second one must find it as it came.
        copies = inbound and (inbound[0], inbound[0].copies(inbound[1]))
        with nothing_saved(), self.buffers.noted(stage) as former:
            saved, crossings, result = self._run(stage, micro_batch, batch, copies)
        if not crossings:
            batch.keep(micro_batch, saved, result)
        calls = next((crossing.path.calls for crossing in crossings.values()), None)
        return Kept(inbound, calls, former), {
            to: Crossing(crossing.path, tuple(tensor.detach() for tensor in crossing.tensors))
            for to, crossing in crossings.items()
        }

    def recompute(self, stage: int, micro_batch: int, batch: Batch, kept: Kept) -> Saved:
        """Run the step again, now keeping what the backward pass needs."""
        with recomputing(), self.buffers.restored(kept.buffers):
            saved, crossings, _ = self._run(stage, micro_batch, batch, kept.inbound)
        if next((crossing.path.calls for crossing in crossings.values()), None) != kept.calls:
            raise CutError(
                f"stage {stage} took another path when micro-batch {micro_batch} was computed again.",
                hint="Steps must not depend on counters, time or random numbers of other libraries than torch, random "
                "and numpy; or use recompute='never'.",
            )
        return saved

    def trial(self, stage: int, micro_batch: int, batch: Batch, inbound: Inbound | None) -> Tensor:
        """The loss of a run that nothing else is to come of."""
        return loss_of(self._run(stage, micro_batch, batch, inbound)[2])

    def _look(self, stage: int, micro_batch: int, batch: Batch, inbound: Inbound | None) -> None:
        if batch.check is not None:
            batch.check.see(self, stage, micro_batch, batch, inbound)

    def _run(self, stage: int, micro_batch: int, batch: Batch, inbound: Inbound | None) -> tuple[Saved, Crossings, Any]:
        run = StageRun(
            StageLayers(stage, self.layers[stage], self.names, self.routes.get(stage, {})),
            inbound,
            partial(batch.streams.isolated, micro_batch),
            self.ownership,
            self.device,
            self.interceptor.cache,
            profiler=self.profiler if batch.training else None,
            training=batch.training,
            alone=batch.alone,
        )
        received = (
            tuple(e.number for e in inbound[0].entries if e.number in inbound[1] and e.requires_grad) if inbound else ()
        )
        part = batch.slice(micro_batch)
        batch.streams.seed_user_code(micro_batch)
        run.tracker.lineage.begin(tree_leaves(part))
        with forward_pass(stage):
            result = self.interceptor.follow(run, lambda: batch.step(micro_batch, part))
        self.called |= run.called
        if run.called:
            self.skipped[stage] = run.skips.events
        saved = Saved(run.arrival.incoming, received, {}, None, run.tracker.used, run.whole)
        if not run.crossings:
            if batch.training:
                saved.loss = loss_of(result) * batch.weights[micro_batch]
        elif batch.training:
            for crossing in run.crossings.values():
                pairs = zip(crossing.path.entries, crossing.tensors, strict=True)
                saved.outbound.update((entry.number, tensor) for entry, tensor in pairs if entry.requires_grad)
        return saved, run.crossings, result

    def backward(
        self, saved: Saved, gradients: Mapping[int, Tensor], used: frozenset[int]
    ) -> tuple[dict[int, Tensor], frozenset[int]]:
        """Run backward.

        Args:
            saved: what the forward pass left.
            gradients: by number, the gradients of what left; empty on the last stage.
            used: the numbers that later stages used.

        Returns:
            By number, the gradients of what was received, and the numbers used here or later.
        """
        results, arrived = _ends(saved, gradients)
        if results:
            torch.autograd.backward(results, arrived)
        returned = saved.returned()
        return returned, frozenset(saved.used | used | returned.keys())

    def backward_input(
        self, saved: Saved, gradients: Mapping[int, Tensor], used: frozenset[int]
    ) -> tuple[dict[int, Tensor], frozenset[int]]:
        """The half of `backward` that the previous stage waits for; `backward_weight` does the rest."""
        results, arrived = _ends(saved, gradients)
        if results:
            entry = saved.inbox.anchor if saved.inbox is not None and saved.inbound else None
            saved.split = SplitBackward(results, arrived, entry, saved.whole)
            saved.split.input_half()
        returned = saved.returned()
        return returned, frozenset(saved.used | used | returned.keys())

    def backward_weight(self, saved: Saved) -> None:
        """The gradients of the weights."""
        if saved.split is not None:
            saved.split.weight_half()


def _ends(saved: Saved, gradients: Mapping[int, Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Where a backward pass begins: tensors and their gradients."""
    if saved.loss is not None:
        return ([saved.loss], [None]) if saved.loss.requires_grad else ([], [])
    wanted = [number for number in saved.outbound if number in gradients]
    results, arrived = [saved.outbound[n] for n in wanted], [gradients[n] for n in wanted]
    if saved.whole and len(results) == 1:
        # Hooks of several tensors ask which nodes run, and the engine forgets a single one to start from (torch 2.13).
        leaf = torch.zeros((), requires_grad=True)
        return [*results, leaf], [*arrived, torch.zeros_like(leaf)]
    return results, arrived  # type: ignore[return-value]


def _detached(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.detach()
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)


def loss_of(result: Any) -> Tensor:
    """The loss in what a training step returned: a tensor, or a mapping with the key ``loss``.

    Raises:
        ConfigurationError: there is none, or it is not a single number.
    """
    loss = result if isinstance(result, Tensor) else result.get("loss") if isinstance(result, Mapping) else None
    if result is None:
        raise ConfigurationError(
            "The training step returned None: a pipeline cannot skip a batch, whose other micro-batches are under way.",
            hint=NO_SKIPPING,
        )
    if not isinstance(loss, Tensor):
        raise ConfigurationError(
            f"The training step returned {type(result).__name__} without a loss tensor.",
            hint="Return the loss, or a dictionary with the key 'loss'.",
        )
    if loss.numel() != 1:
        raise ConfigurationError(f"The loss must be a single number, not a tensor of shape {tuple(loss.shape)}.")
    return loss.reshape(())
