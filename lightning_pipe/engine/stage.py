"""One stage on one micro-batch: forward through the user's step, backward through what it left."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.engine.batch import Batch
from lightning_pipe.engine.split_backward import backward, input_half
from lightning_pipe.errors import ConfigurationError, CutError, PipeError
from lightning_pipe.intercept.call_record import CallRecord
from lightning_pipe.intercept.crossing import Crossing, Returned
from lightning_pipe.intercept.incoming import Incoming
from lightning_pipe.intercept.interceptor import Interceptor
from lightning_pipe.intercept.layer_state import FirstRun
from lightning_pipe.intercept.recompute import nothing_saved, recomputing
from lightning_pipe.intercept.stage_layers import StageLayers
from lightning_pipe.intercept.stage_run import NO_SKIPPING, StageRun
from lightning_pipe.local_parts import local
from lightning_pipe.parameters.deferred_batchnorm import begin_pass

Receive = Callable[[], Crossing | None]
"""Gives what earlier stages send, when it has come; nothing comes to the first one."""
Crossings = dict[int, Crossing]
"""What leaves a stage, by the stage that receives it; nothing leaves the last one."""


@dataclass
class Saved:
    """What a forward pass leaves for its backward pass.

    Args:
        inbox: the entry of the received tensors into the graph.
        outbound: by number, the tensors that left and need gradients.
        loss: the weighted loss, on the last stage.
        used: the numbers of the received tensors that were used.
        whole: whether the backward pass cannot be divided into halves.
        rest: the half of the backward pass that is still to run.
    """

    inbox: Incoming | None
    outbound: dict[int, Tensor]
    loss: Tensor | None
    used: set[int]
    whole: bool
    rest: Callable[[], None] | None = None

    def release(self) -> None:
        """Let go of the graph, whose backward pass has run: freeing it is a part of the stage's time."""
        self.inbox = self.loss = self.rest = None
        self.outbound.clear()


@dataclass
class Kept:
    """What a forward pass leaves that will run again: its input, and the calls it made up to the boundary.

    ``first`` has what the run has found, ``sums`` tells of thorough runs what they left.
    """

    inbound: Crossing | None
    path: list[CallRecord]
    first: FirstRun
    sums: Mapping[int, tuple[Tensor, float]] | None


@dataclass
class Stages:
    """Runs the stages of one rank.

    Args:
        interceptor: stands between the user's step and the layers.
        layers: the layers of each stage of the pipeline.
    """

    interceptor: Interceptor
    layers: Sequence[StageLayers]

    def forward(self, stage: int, micro_batch: int, batch: Batch, receive: Receive) -> tuple[Saved, Crossings]:
        """Run the step for one stage. Returns what backward needs and, by receiving stage, what leaves."""
        saved, crossings, result = self._run(stage, micro_batch, batch, receive)
        batch.streams.end_user_code()
        if not (crossings or batch.repeats):
            batch.keep(micro_batch, saved.loss, result)
        return saved, crossings

    def forward_again(self, stage: int, micro_batch: int, batch: Batch, receive: Receive) -> tuple[Kept, Crossings]:
        """Run the step for one stage, to be run again by `recompute`: keep the input alone."""
        # The first run may change what it received; the second one must find it as it came.
        copies = (inbound := receive()) and inbound.copied()
        first = self.interceptor.state.begin_first()
        with _telling(), nothing_saved(), self.interceptor.buffers.noted(first.formers, thorough=batch.thorough):
            saved, crossings = self.forward(stage, micro_batch, batch, lambda: copies)
        sums = _sums(saved, crossings) if batch.thorough else None
        kept = Kept(inbound, _path(crossings), first, sums)
        return kept, {to: crossing.detached() for to, crossing in crossings.items()}

    def recompute(self, stage: int, micro_batch: int, batch: Batch, kept: Kept) -> Saved:
        """Run the step again, now keeping what the backward pass needs."""
        with recomputing(), self.interceptor.buffers.restored(), self.interceptor.state.restored(kept.first):
            saved, crossings, _ = self._run(stage, micro_batch, batch, lambda: kept.inbound)
        same_path = _path(crossings) == kept.path
        if not same_path or (kept.sums is not None and not _alike(_sums(saved, crossings), kept.sums)):
            raise CutError(
                f"stage {stage} {'left other values' if same_path else 'took another path'} when micro-batch "
                f"{micro_batch} was computed again.",
                hint="What is computed must not depend on counters, iterators and generators of one's own, time, or "
                "random numbers of other libraries than torch, random and numpy; or use recompute='never'.",
            )
        return saved

    def trial(self, stage: int, micro_batch: int, batch: Batch, inbound: Crossing | None) -> tuple[Crossings, Any]:
        """A run that nothing else is to come of: what would leave, and what the step returned."""
        # what the step changes has changed since the words were made
        return self._run(stage, micro_batch, batch, lambda: inbound and replace(inbound, words=()))[1:]

    def _run(self, stage: int, micro_batch: int, batch: Batch, receive: Receive) -> tuple[Saved, Crossings, Any]:
        isolated = partial(batch.streams.isolated, micro_batch)
        run = StageRun(self.layers[stage], isolated, self.interceptor.cache, training=batch.training)
        run.tracker.alone, run.tracker.digest.thorough = batch.undisturbed, batch.thorough
        inputs = batch.slice(micro_batch)
        # Every run of a micro-batch draws the same numbers, on whichever stage and for whichever time.
        batch.streams.seed_user_code(micro_batch)
        run.tracker.digest.begin(inputs)
        begin_pass(stage)
        result = None
        try:
            result = self.interceptor.follow(run, lambda: batch.step(micro_batch, inputs), receive)
        except CutError:
            if not batch.ahead:
                raise
            run.end_again()  # what is wrong in itself is so again when the batch runs behind the others
        batch.repeats |= run.repeats
        saved = Saved(run.incoming, {}, None, run.tracker.used, run.whole)
        if not run.crossings:
            if batch.training:
                loss, weight = loss_of(result), batch.weights[micro_batch]
                # what counts nothing may be 0 / 0: its gradients would be no numbers, times 0 as well
                saved.loss = loss * weight if weight else loss.detach()
        elif batch.training:
            for crossing in run.crossings.values():
                saved.outbound |= {number: crossing.tensors[number] for number in crossing.differentiable}
        return saved, run.crossings, result

    def backward(self, saved: Saved, came: Returned, *, whole: bool) -> Returned:
        """Run backward.

        Args:
            saved: what the forward pass left.
            came: what has come back from later stages; nothing on the last stage.
            whole: ``False``: run the half that the previous stage waits for; `backward_weight` does the rest.

        Returns:
            What goes back to earlier stages: the gradients of what was received, and the numbers used here or later.
        """
        results, arrived = _ends(saved, came.gradients)
        # Nothing to start from: no later stage used what left here, or nothing of it is trained.
        if results:
            with _telling():
                if whole:
                    backward(results, arrived)
                else:
                    entry = saved.inbox.anchor if saved.inbox is not None and saved.inbox.numbers else None
                    saved.rest = input_half(results, arrived, entry, whole=saved.whole)
        returned: dict[int, Tensor] = {}
        if saved.inbox is not None:
            saved.inbox.check_hooks()
            pairs = zip(saved.inbox.numbers, saved.inbox.gradients, strict=True)
            returned = {number: gradient for number, gradient in pairs if gradient is not None}
        if whole:
            saved.release()
        return Returned(returned, frozenset(saved.used | came.used | returned.keys()))

    def backward_weight(self, saved: Saved) -> None:
        """The gradients of the weights."""
        if saved.rest is not None:
            with _telling():
                saved.rest()
        saved.release()


@contextmanager
def _telling() -> Iterator[None]:
    """Around what depends on what graphs keep: say why torch cannot do it in a pipeline, and what can be done.

    Raises:
        CutError: what a backward pass needs has changed in place, or code differentiates where nothing is kept.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, PipeError):
            raise
        if "support saved tensor hooks" in text:
            raise CutError(
                "a step or layer uses torch.func (grad, vjp, jacrev, hessian), which torch refuses where nothing is "
                "kept for a backward pass, as in the first of the two runs with recompute.",
                hint="Use recompute='never', or torch.autograd.grad within the layer.",
            ) from error
        if "modified by an inplace operation" not in text:
            raise
        found = re.search(r"\[.*?\](?= is at version)|\[[^\]]* \[[^\]]*\]\]", text)
        raise CutError(
            f"the backward pass of a micro-batch needs a tensor {found[0] if found else ''} that has changed in place "
            "since its forward pass. One device runs each backward pass before the next forward pass; here others come "
            "between the two, and what a stage before the last one has changed is put back.",
            hint="Change it in a hook, such as on_train_batch_end (where 'pipedream' and 'pipedream_2bw' have batches "
            "under way as well: use '1f1b'); or set another tensor in its place in the forward pass (`self.scale = "
            "self.scale * 0.9`). If training fails on one device, too, the error is in the code that changes it.",
        ) from error


@torch.no_grad()
def _sums(saved: Saved, crossings: Crossings) -> dict[int, tuple[Tensor, float]]:
    """A number for each tensor that a run leaves, and by what part of it that of the second run may be another one."""
    found = {number: local(each) for crossing in crossings.values() for number, each in crossing.tensors.items()}
    found |= {-1: saved.loss} if saved.loss is not None else {}
    real = {number: each.abs() if each.is_complex() else each for number, each in found.items()}
    floats = {number: each if each.is_floating_point() else each.double() for number, each in real.items()}
    return {
        number: (
            # its norm, and less of its sum than that: neither signs nor places cancel
            2 * torch.linalg.vector_norm(each, dtype=torch.float64)
            + each.sum(dtype=torch.float64) / max(1, each.numel()) ** 0.5,
            max(1e-5 if each.is_cpu else 1e-3, torch.finfo(each.dtype).eps),
        )
        for number, each in floats.items()
    }


def _alike(one: Mapping[int, tuple[Tensor, float]], other: Mapping[int, tuple[Tensor, float]]) -> bool:
    """Whether what two runs leave is the same; each may leave more, of which nothing is known in the other."""
    return all(
        torch.allclose(one[number][0], sums, rtol=rounding, atol=0, equal_nan=True)
        for number, (sums, rounding) in other.items()
        if number in one
    )


def _path(crossings: Crossings) -> list[CallRecord]:
    """What a run and its second one must have in common; the last stage ends at no boundary and has no path."""
    paths = [crossing.path for crossing in crossings.values()]
    return [call._replace(changing=()) for path in paths[:1] for call in path.calls]


def _ends(saved: Saved, gradients: Mapping[int, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Where a backward pass begins: tensors and their gradients."""
    if (loss := saved.loss) is not None:
        return ([loss], [torch.ones_like(loss)]) if loss.requires_grad else ([], [])
    wanted = [number for number in saved.outbound if number in gradients]
    results, arrived = [saved.outbound[n] for n in wanted], [gradients[n] for n in wanted]
    if saved.whole and len(results) == 1:
        # Hooks of several tensors ask which nodes run, and the engine forgets a single one to start from (torch 2.13).
        leaf = torch.zeros((), requires_grad=True)
        return [*results, leaf], [*arrived, torch.zeros_like(leaf)]
    return results, arrived


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
    if loss.numel() != 1 or loss.is_complex():
        what = f"{loss.dtype} tensor of shape {tuple(loss.shape)}"
        raise ConfigurationError(f"The loss must be a single real number, not a {what}.")
    return loss.reshape(()) if loss.ndim else loss
