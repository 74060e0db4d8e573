"""One run of the user's step for one stage: runs local layers, stands in for foreign ones, ends at the cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import BackwardHook

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import CallRecord, Crossing, LiveTensor, RunRecord
from lightning_pipe.intercept.describe import Descriptions
from lightning_pipe.intercept.effects import AttributeKeepers, Watch
from lightning_pipe.intercept.incoming import Incoming
from lightning_pipe.intercept.inner_hooks import HookedParts, shown
from lightning_pipe.intercept.outgoing import check_plain, check_surroundings, entry_of, overlapping
from lightning_pipe.intercept.parameter_use import ParameterUse
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.random_streams import RandomStreams
from lightning_pipe.intercept.recompute import release_saved
from lightning_pipe.intercept.skipped_layers import SkippedLayers
from lightning_pipe.intercept.tensor_state import TensorState, has_changed, state_of, version_of
from lightning_pipe.intercept.torch_functions import FLAT
from lightning_pipe.intercept.torch_patches.activation_checkpoints import Checkpoint
from lightning_pipe.intercept.torch_patches.autograd_functions import Unit, check_not_hidden
from lightning_pipe.intercept.tracker import Tracker
from lightning_pipe.skip import SkipKey, StepStore, stored_in
from lightning_pipe.torch_internals import graph_nodes, tree_leaves

_AS_IT_IS = nullcontext()
_END = "the end of the step"


Stashed = Mapping[SkipKey, Tensor | None]
_NO_SHARING = "Use the out-of-place form, or .clone() one of them."
NO_SKIPPING = (
    "Let the loader leave such batches out, or return a loss of zero that runs the layers: 0.0 * self(x).sum()."
)

Profiler = Callable[[str, int, Callable[..., Any], Any, Any, Stashed], None]
"""Called before a layer or outside module runs: name, key (negative outside), forward, arguments, skip tensors."""


class _EndOfStage(BaseException):
    """Ends the user's step at a cut. Not an ``Exception``: the step's own handlers must not catch it."""


class Learnt:
    """What the runs of one rank learn for later ones.

    Attributes:
        keepers: which modules keep tensors as attributes.
        descriptions: what calls leave behind.
        hooked: which parts of modules have forward hooks.
    """

    def __init__(self) -> None:
        self.keepers, self.descriptions, self.hooked = AttributeKeepers(), Descriptions(), HookedParts()


class StageRun:
    """One run of the user's step for one stage and one micro-batch.

    Args:
        stage: the stage.
        layers: its layers by number.
        total: number of layers of the whole sequence.
        names: dotted names of the layers, for messages.
        inbound: the previous stage's path with the tensors received for it; ``None`` on the first stage.
        micro_batch: keys the random streams.
        streams: the batch's random streams.
        holdings: the module's parameters and buffers outside layers.
        device: where placeholders pretend to be.
        learnt: what earlier runs have learnt.
        routes: the skip connections that leave this stage for another than the next, with the stage they go to.
        profiler: measures layers as they are called; ``None``: no measurement.
        training: whether a backward pass follows; otherwise the step may leave layers out.
        alone: whether no other micro-batch is under way, which could read what this one changes.

    Attributes:
        whole: whether its backward pass cannot be divided into halves.
    """

    def __init__(
        self,
        stage: int,
        layers: range,
        total: int,
        names: Sequence[str],
        inbound: tuple[RunRecord, dict[int, Tensor]] | None,
        micro_batch: int,
        streams: RandomStreams,
        holdings: ParameterUse,
        device: torch.device,
        learnt: Learnt,
        routes: Mapping[SkipKey, int] | None = None,
        profiler: Profiler | None = None,
        training: bool = True,
        alone: bool = False,
    ) -> None:
        self._stage, self.layers, self._total, self._names = stage, layers, total, names
        self.called: set[int] = set()
        self.crossings: dict[int, Crossing] = {}
        self.inside = self.whole = False
        self.checkpoint: Checkpoint | None = None
        self.unit: Unit | None = None
        self.hooked: list[BackwardHook] = []
        self.inbox: Incoming | None = None
        self._inbound, self._begin = inbound, 0
        self.skips = StepStore()
        self._routes = routes or {}
        self._routed: dict[int, int] = {}
        self._profiler, self.training = profiler, training
        self._shared: list[tuple[Tensor, int, int]] = []
        self._lenders: list[tuple[Tensor, TensorState, int]] = []
        self._borrowed: dict[int, tuple[int, int]] = {}
        self._micro_batch, self._streams = micro_batch, streams
        self._holdings, self._learnt = holdings, learnt
        self._whole = len(layers) == total
        expected = inbound[0].calls if inbound else None
        self.tracker = Tracker(expected, self.stream, holdings, partial=not self._whole, alone=alone)
        self.stand_in = SkippedLayers(self.tracker, self.skips, device)

    # ------------------------------------------------------------------ the run

    def run(self, step: Callable[[], Any]) -> Any:
        """Run the step. Returns what it returned on the last stage; elsewhere ``crossings`` has what leaves."""
        result = None
        try:
            with self.tracker:
                result = step()
                self.returning(result)
        except _EndOfStage:
            pass
        except CutError as error:
            if not _is_generating(error):
                raise
            raise CutError(
                "generate() runs the layers once for every token; in a pipeline a step may run them once: "
                f"{error.message}",
                hint="Generate after training, when the module is whole again, from a checkpoint, or on one device.",
            ) from None
        else:
            self._returned(result)
        finally:
            self.stand_in.attributes.restore()
        self._check_shared()
        return result

    def _check_shared(self) -> None:
        """Raise if one of two tensors with one memory has changed since the cut at which they became two."""
        for tensor, version, number in self._shared:
            if version_of(tensor) != version:
                raise CutError(
                    f"tensor {number}, {tuple(tensor.shape)}, is changed in place after a cut, and another tensor that "
                    "crosses the cut shares its memory.",
                    hint=_NO_SHARING,
                )
        if not self._lenders:
            return
        needed = self.tracker.used | {entry.number for to in self.crossings.values() for entry in to.path.entries}
        for tensor, state, number in self._lenders:
            if number in needed and has_changed(tensor, state):
                raise CutError(
                    f"a tensor {tuple(tensor.shape)} {tensor.dtype} is changed in place after a cut, and what a layer "
                    f"before the cut returned, tensor {number}, shares its memory.",
                    hint=_NO_SHARING,
                )

    def returning(self, result: Any) -> None:
        """The step is about to return ``result``: an evaluation that leaves layers out is cut here instead.

        To be called where the step's contexts can still be told that its run was cut short.
        """
        waiting, last = self._inbound is not None, self.layers.stop == self._total
        if self.training or (last and not waiting) or (waiting and not self.tracker.expects(_END)):
            return
        if waiting:
            self.tracker.expect(_END)
            self.arrive()
        else:
            self.tracker.calls.append(CallRecord(_END, (), ()))
        if not last:
            self._cut()

    def _returned(self, result: Any) -> None:
        last = self.layers.stop == self._total
        if self._inbound is not None or not last:
            missing = self.layers.stop if self._inbound is None else self.layers.start
            if result is None:
                raise CutError(
                    f"the step returned None before layer '{self._names[missing]}' was called: a pipeline cannot "
                    "skip a batch half-way.",
                    hint=NO_SKIPPING,
                )
            raise CutError(
                f"the step returned before layer '{self._names[missing]}' was called, or any layer behind it.",
                hint="A training step may leave layers out if it runs the last one: LayerDrop must keep that (in "
                "transformers layerdrop=0.0). If these layers belong to no step, name another sequence: layers=... .",
            )
        self.tracker.touch([leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)], "the step's result")
        # what outlives the step is read later: attributes, lists, what was logged
        self.tracker.used.update(number for number, _ in self.tracker.numbers.alive())
        self.skips.check_empty()

    # ------------------------------------------------------------------ calls that arrive from the user's code

    def call_layer(self, number: int, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A layer of the sequence is called."""
        name = self._names[number]
        if self.tracker.waiting and number < self.layers.start:
            return self._answer(name, layer, args, kwargs)
        self.arrive()
        if number >= self.layers.stop:
            self._cut(layer)
        if number < self.layers.start or number in self.called:
            raise CutError(
                f"layer '{name}' is called a second time, or out of order, in one step.",
                hint="A step may run the layer sequence once, in order (siamese networks call it several times); name "
                "another sequence with layers=... or use one device.",
            )
        self.called.add(number)
        self.whole |= self.whole_unit is not None  # its backward computes the layer's gradients at one go
        return self._execute(name, number, layer, forward, args, kwargs)

    def call_module(
        self, name: str, key: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """A module outside the sequence that has parameters is called."""
        if self.tracker.waiting:
            return self._answer(name, module, args, kwargs)
        self._holdings.run(name)
        for parameter in module.parameters():
            self._holdings.use(parameter)
        return self._execute(name, key, module, forward, args, kwargs)

    def _answer(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        with self.tracker.paused():
            return self.stand_in.answer(name, module, args, kwargs)

    def _execute(
        self, name: str, key: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        tracker, learnt = self.tracker, self._learnt
        given = [*args, *kwargs.values()]
        plain = FLAT.issuperset(map(type, given))  # nothing in them can change
        arguments = given if plain else tree_leaves((args, kwargs))
        tensors = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
        self.inside = True
        try:
            with tracker.paused(), self.stream(key), stored_in(self.skips):
                tracker.touch(tensors, name)
                before, received = tracker.in_place.noted(tensors), tracker.given(tensors)
                skips, events = dict(self.skips), len(self.skips.events)
                if self._profiler is not None:
                    self._profiler(name, key, forward, args, kwargs, skips)
                seeks = not self._whole and learnt.keepers.seeks(name, module)
                watch = None
                if seeks or not (self._whole or plain):
                    watch = Watch(name, module, given, arguments, seeks)
                if seeks and watch is not None:
                    tracker.used.update(n for each in watch.attributes() if (n := tracker.numbers.of(each)) is not None)
                hooked = () if self._whole else learnt.hooked.of(module)
                start = graph_nodes()
                with shown(self, name, hooked, arguments) if hooked else _AS_IT_IS:
                    result = forward(*args, **kwargs)
                tracker.spans.append((start, graph_nodes()))
                changed = tracker.in_place.changed(before, name)
                release_saved()
                stashed, popped = self._skipped(name, skips, events) if len(self.skips.events) > events else ({}, ())
                call = learnt.descriptions.describe(
                    tracker, name, result, arguments, changed, stashed, popped, watch, received
                )
                tracker.calls.append(call)
                if seeks:
                    learnt.keepers.note(name, module, any(effect.attribute for effect in call.effects))
        finally:
            self.inside = False
        return result

    def stream(self, *key: int) -> AbstractContextManager[None]:
        """The random stream of ``key``, or of the code around; a checkpoint that runs again uses it again."""
        if self.whole_unit is not None:
            return nullcontext()
        if key and self.checkpoint is None:
            return self._streams.isolated(self._micro_batch, *key)
        stream = partial(self._streams.isolated, self._micro_batch, *key) if key else nullcontext
        if self.checkpoint is not None:
            self.checkpoint.streams.append(stream)
        return stream()

    @property
    def whole_unit(self) -> Unit | None:
        """The Function that is being applied outside layers and cannot be cut."""
        return self.unit if self.unit is not None and self.unit.differentiable else None

    def _skipped(
        self, name: str, before: Stashed, events: int
    ) -> tuple[dict[SkipKey, Tensor | None], tuple[SkipKey, ...]]:
        """The skip connections that a call begins, and those of ``before`` that it ends, by its events.

        One that goes its own way gets a number of its own. A call may end one and begin another under the same key.
        """
        new = self.skips.events[events:]
        stashed = {key: tensor for key, tensor in self.skips.items() if (key, True) in new}
        popped = tuple(key for key in before if (key, False) in new)
        self.tracker.touch([tensor for key in popped if (tensor := before[key]) is not None], f"{name} (skip)")
        for key, tensor in stashed.items():
            if tensor is not None and key in self._routes:
                # a view would keep the tensor alive, and in an evaluation what is alive travels to the next stage
                alias = tensor.view_as(tensor) if tensor.requires_grad else tensor.detach()
                self.skips[key] = stashed[key] = alias
                self._routed[self.tracker.numbers.give(alias)] = self._routes[key]
        return stashed, popped

    # ------------------------------------------------------------------ the two ends of a stage

    def arrive(self) -> None:
        """This stage's first layer is reached: give the placeholders the received values."""
        if self._inbound is None:
            return
        self.tracker.arrive()
        path, values = self._inbound
        self._inbound = None
        with self.tracker.paused():
            entries = [entry for entry in path.entries if entry.number in values]
            self.inbox = Incoming(
                [values[entry.number] for entry in entries],
                [entry.requires_grad for entry in entries],
                skips=any(call.stashed for call in path.calls),
            )
            self.inbox.tensors.reverse()
            if self.training and self.unit is None and any(self.inbox.requires_grad):
                check_not_hidden(self._names[self.layers.start])
            self._begin = graph_nodes()
            kept = {
                self.tracker.numbers.of(tensor): tensor
                for tensor, name in self.stand_in.kept
                if self._holdings.may_run(name)
            }
            for entry in entries:
                if entry.lender is not None:
                    self._borrow(entry.number, entry.lender)
                # The list lets go of each: what a view held before must be gone before the turn of its base comes.
                value, own = self.inbox.tensors.pop(), kept.get(entry.number)
                # Filling swaps the two; but a view must let go of its memory.
                copy = own.clone() if own is not None and own._is_view() else None
                self.tracker.numbers.fill(entry.number, value)
                if own is not None and entry.number not in self.tracker.numbers.unfilled:
                    self.stand_in.attributes.filled(own, value if copy is None else copy)
            for number, name in self.stand_in.missing(values):
                self.tracker.numbers.unfilled[number] = (
                    f"'{name}' changes it in place on an earlier stage, which did not send it: in the first batch of "
                    "this shape nothing needed it."
                )
            shared = {entry.number for entry in entries if entry.shared}
            alive = self.tracker.numbers.alive() if shared else ()
            self._shared = [(tensor, version_of(tensor), number) for number, tensor in alive if number in shared]

    def is_older(self, tensor: Tensor | GradientEdge) -> bool:
        """Whether a tensor of a graph was there before this stage's first layer, for earlier stages to use."""
        node = tensor.node if isinstance(tensor, GradientEdge) else tensor.grad_fn
        leaf = getattr(node, "variable", None if node is not None else tensor)
        if leaf is None:
            return bool(node._sequence_nr() < self._begin)  # type: ignore[union-attr]
        answered = (parameter for module in self.stand_in.modules for parameter in module.parameters())
        return id(leaf) in self.tracker.leaves or any(parameter is leaf for parameter in answered)

    def _borrow(self, number: int, lender: tuple[int, int]) -> None:
        """A tensor has come that is a copy here of memory which this stage has for itself."""
        own = self.stand_in.lenders.get(lender)
        if own is not None and not self.tracker.numbers.derived(own):
            self._lenders.append((own, state_of(own), number))
            self._borrowed[number] = lender

    def _cut(self, layer: nn.Module | None = None) -> None:
        """The next stage's first ``layer`` is reached: collect what is alive and end the step."""
        check_surroundings(self, self._names[self.layers.stop], layer)
        calls, following = tuple(self.tracker.calls), self.tracker.numbers.following
        if (unit := self.whole_unit) is not None:  # it begins on the next stage
            calls, following = calls[: unit.calls], unit.following
        with self.tracker.paused():
            alive = [
                (number, tensor)
                for number, tensor in sorted(self.tracker.numbers.alive(), key=lambda pair: pair[0])
                if number < following
                and not isinstance(tensor, (Placeholder, nn.Parameter))
                and number not in self.tracker.numbers.unfilled
            ]
            for _, tensor in alive:
                check_plain(tensor, self._names[self.layers.stop])
            # What came as copies of one memory still stands for one memory where it goes next.
            shared = overlapping([tensor for _, tensor in alive]) | {id(tensor) for tensor, *_ in self._shared}
            next_stage = self._stage + 1
            leaving: dict[int, list[tuple[LiveTensor, Tensor]]] = {next_stage: []}
            for number, tensor in alive:
                lender = self.tracker.in_place.lender_of(tensor) or self._borrowed.get(number)
                entry = entry_of(number, tensor, id(tensor) in shared, lender)
                leaving.setdefault(self._routed.get(number, next_stage), []).append((entry, tensor))
            for to, pairs in leaving.items():
                path = RunRecord(calls, tuple(entry for entry, _ in pairs))
                self.crossings[to] = Crossing(path, tuple(tensor for _, tensor in pairs))
        raise _EndOfStage


def _is_generating(error: CutError) -> bool:
    """Whether an error comes from code that generates token by token."""
    return any(frame.f_code.co_name == "generate" for frame, _ in walk_tb(error.__traceback__))
