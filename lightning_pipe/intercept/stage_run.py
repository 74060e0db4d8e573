"""One run of the user's step for one stage.

Every rank runs the user's own step. In it each stage runs its own layers alone. A sequence of four layers, cut into two
stages behind layer 1::

    def training_step(self, batch):             stage 0                     stage 1
        x = batch["x"] * 2                      computes                    computes                    (1)
        h = self.embed(x)                       runs: tensor 0              placeholder: tensor 0       (2)
        h = self.layers[0](h)                   runs: tensor 1              placeholder: tensor 1
        h = h + x                               runs: tensor 2              placeholder: tensor 2       (3)
        h = self.layers[1](h)                   runs: tensor 3              placeholder: tensor 3
                                                                            placeholders are filled     (4)
        h = self.layers[2](h)                   EndOfStage                 runs: tensor 4              (5)
        h = self.layers[3](h)                                               runs: tensor 5
        return loss(self.head(h))                                           returns                     (6)

1. What comes from the batch alone has no number: every stage computes it (`Digest` checks that they do the same).
2. What comes from a layer, an outside module or a parameter is *derived*, and is numbered in the order in which it
   appears (`Numbers`). Stage 0 records each call (`CallRecord`). Stage 1 has the record of stage 0 and answers the same
   calls with placeholders of the same numbers (`SkippedLayers`).
3. torch functions of derived tensors are followed in the same way (`Tracker`).
4. Stage 1 reaches its first layer: its record must be complete, and the placeholders get the values that stage 0 sent
   (`Incoming`). They are the same objects as before, so whoever holds one sees the value.
5. Stage 0 reaches the first layer of stage 1: the numbered tensors that are still alive leave (`crossings_of`), with
   the record, and the step ends by an exception that the user's code does not catch.
6. On the last stage alone the step returns. An evaluation may leave layers out: it is cut where it returns.

A layer may be called several times in a row: it belongs to one stage. A step that comes back to an earlier stage has
several passes, and ends there on all stages (`StageRun.repeats`): another kind of run has to do it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import AGAIN, CallRecord, RunRecord
from lightning_pipe.intercept.crossing import Crossing, crossings_of
from lightning_pipe.intercept.incoming import Entry, Incoming, edge_of, nodes_behind
from lightning_pipe.intercept.layer_calls import LayerCalls, RunCache
from lightning_pipe.intercept.layer_tensors import check_unchanged
from lightning_pipe.intercept.recompute import is_recomputing
from lightning_pipe.intercept.skipped_layers import SkippedLayers
from lightning_pipe.intercept.stage_layers import CallNumbers, StageLayers
from lightning_pipe.intercept.tensor_state import version_of
from lightning_pipe.intercept.torch_functions import leaves_of
from lightning_pipe.intercept.tracker import Tracker
from lightning_pipe.skip import StepStore, stored_in
from lightning_pipe.torch_internals import functorch_active, graph_nodes

_END = "the end of the step"
NO_SKIPPING = (
    "Let the loader leave such batches out, or return a loss of zero that runs the layers: 0.0 * self(x).sum()."
)


class EndOfStage(BaseException):
    """Ends the user's step where others go on. Not an ``Exception``: the step's own handlers must not catch it."""


class StageRun:
    """One run of the user's step for one stage and one micro-batch.

    Args:
        stage: the stage's layers.
        isolated: gives a context with the micro-batch's random stream of a key.
        cache: what runs have in common, and earlier ones have kept.
        training: whether a backward pass follows; otherwise the step may leave layers out, or come back to an earlier
            stage, where this run then ends.
        tracker: of another kind of run, which follows the code outside layers in its own way.

    Attributes:
        repeats: whether the step has come back to an earlier stage, or has run ahead of what it computes with.
        pending: what has been received and is not in the step yet.
        incoming: the entry of what has been received into autograd, once it is in the step.
        copied: the tensors that have come as copies of one memory, with their versions and numbers.
        crossings: what leaves, by the stage that receives it.
        whole: whether its backward pass cannot be divided into halves.
    """

    def __init__(
        self,
        stage: StageLayers,
        isolated: Callable[..., AbstractContextManager[None]],
        cache: RunCache,
        *,
        training: bool = True,
        tracker: Tracker | None = None,
    ) -> None:
        self.stage, self.training, self.repeats = stage, training, False
        self.pending: Crossing | None = None
        self._begin = 0
        self.incoming: Incoming | None = None
        self.copied: list[tuple[Tensor, int | None, int]] = []
        self._numbers = CallNumbers(stage)
        self.crossings: dict[int, Crossing] = {}
        self.whole = False
        self.skips = StepStore()
        self.tracker = tracker or Tracker(isolated, cache.parameter_use, partial=not stage.all)
        self.surroundings = self.tracker.surroundings
        self.tracker.come_back = None if training else self._come_back
        if not (tracker or stage.all or is_recomputing()):
            self.tracker.changing = partial(check_unchanged, cache.state, training=training)
        self.tracker.digest.since = cache.state.since
        self.skipped_layers = SkippedLayers(self.tracker, self.skips, cache)
        self.layer_calls = LayerCalls(stage, self.tracker, self.skips, cache)

    @property
    def stage_here(self) -> int | None:
        """The stage; ``None``: it has all layers."""
        return None if self.stage.all else self.stage.stage

    @property
    def complete(self) -> bool:
        """Whether the step, which has ended without an error, has returned on the stage that counts."""
        return self.stage.last and self.stage.heard and not (self.repeats or self.crossings)

    # ------------------------------------------------------------------ the run

    def run(self, step: Callable[[], Any], receive: Callable[[], Crossing | None]) -> Any:
        """Run the step, once all is ready and what earlier stages send has come.

        Returns what it returned on the last stage; elsewhere ``crossings`` has what leaves.
        """
        result = None
        try:
            if (inbound := receive()) is not None:  # the user's code would catch an error of the connection
                self.pending = inbound
                self.tracker.waiting, self.tracker.expected = True, inbound.path.calls
                self.tracker.digest.expected = inbound.words
            with self.tracker, stored_in(self.skips):
                result = step()
                self.returning(result)
            self.returned(result)
        except EndOfStage:
            pass
        finally:
            self.skipped_layers.restore()
        self.check_copies()
        return result

    def returning(self, result: Any) -> None:
        """The step is about to return ``result``: an evaluation that leaves layers out is cut here instead.

        To be called where the step's contexts can still be told that its run was cut short.

        Raises:
            CutError: the run had ended before, and the step has gone on.
        """
        if self.crossings or self.repeats:
            raise CutError(
                "the step catches what ends its run on a stage before the last one, and goes on with other values: in "
                "a bare `except:`, in `except BaseException`, or in a context manager that suppresses everything.",
                hint="Catch Exception around the layers, or the errors that are expected there.",
            )
        if not self.stage.heard:
            raise EndOfStage
        self.tracker.in_place.check_arrays()
        waiting, last = self.pending is not None, self.stage.last
        if self.training or (last and not waiting) or (waiting and not self.tracker.expects(_END)):
            return
        if waiting:
            self.tracker.expect(_END)
            self.arrive()
        else:
            self.tracker.calls.append(CallRecord(_END, (), ()))
        self.tracker.digest.words.append(0)  # which says nothing
        if not last:
            self._cut()

    def returned(self, result: Any) -> None:
        """The step has returned, (6): only where it may, and what outlives it counts as used."""
        if self.pending is not None or not self.stage.last:
            missing = self.stage.next_name if self.pending is None else self.stage.names[self.stage.layers.start]
            if result is None:
                raise CutError(
                    f"the step returned None before layer '{missing}' was called: a pipeline cannot "
                    "skip a batch half-way.",
                    hint=NO_SKIPPING,
                )
            raise CutError(
                f"the step returned before layer '{missing}' was called, or any layer behind it.",
                hint="A training step may leave layers out if it runs the last one: LayerDrop must keep that (in "
                "transformers layerdrop=0.0). If these layers belong to no step, name another sequence: layers=... .",
            )
        tensors = [leaf for leaf in leaves_of((result,), {}) if isinstance(leaf, Tensor)]
        self.tracker.touch(tensors, "the step's result")
        # what outlives the step is read later: attributes, lists, what was logged
        self.tracker.used.update([number for number, _ in self.tracker.numbers.alive()])
        self.skips.check_empty()

    # ------------------------------------------------------------------ calls that arrive from the user's code

    def call_layer(self, number: int, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A layer of the sequence is called."""
        name, own = self.stage.names[number], self.stage.layers
        if not self.training and self.tracker.waiting and self.tracker.expects(AGAIN):
            self._come_back(name)
        number, key = self._numbers.next(number)
        if self.tracker.waiting and number < own.start:
            return self.skipped_layers.answer(name, layer, args, kwargs)  # a stage before this one runs it, (2)
        if self.pending is not None:
            self.arrive()
        if number >= own.stop:
            self._cut()
        if number < own.start:
            self._come_back(name, self._numbers.behind)
        return self.layer_calls.run(name, key, layer, forward, args, kwargs)

    def call_module(
        self, name: str, key: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """A module outside the sequence that has parameters is called."""
        if self.tracker.waiting:
            return self.skipped_layers.answer(name, module, args, kwargs)  # (2)
        held = self.layer_calls.cache.parameter_use.holds_all
        if self.tracker.come_back and not held(module.parameters()):
            self._come_back(name)  # its rank runs it before its layers
        return self.layer_calls.run(name, (key,), module, forward, args, kwargs)

    # ------------------------------------------------------------------ the two ends of a stage

    def arrive(self) -> None:
        """This stage's first layer is reached, (4): the placeholders of the run get the received values."""
        if self.pending is None:
            return
        self.tracker.arrive()
        path, values, numbers = self.pending.path, self.pending.tensors, self.tracker.numbers
        self.pending = None
        with self.tracker.paused():
            entries = [entry for entry in path.entries if entry.number in values]
            skips = any(call.stashed for call in path.calls)
            self.incoming = incoming = Incoming(entries, values, skips=skips)
            # behind the node of `Incoming`: what it makes of the received tensors is older than this stage's own graph
            self._begin = graph_nodes()
            # Nothing may hold a value when its turn comes: a view keeps its base from being swapped. So the list lets
            # go of each value as it is taken, from the end, which is the first one.
            incoming.tensors.reverse()
            for entry in entries:
                numbers.fill(entry.number, incoming.tensors.pop())
            shared = {entry.number for entry in entries if entry.shared}
            alive = numbers.alive() if shared else ()
            self.copied = [(tensor, version_of(tensor), number) for number, tensor in alive if number in shared]
        self.tracker.followed = not self.stage.last
        self.tracker.digest.idle = self.stage.last  # nobody compares what follows

    def check_backward(self, outputs: Sequence[Tensor | GradientEdge], inputs: Sequence[Tensor | GradientEdge]) -> None:
        """A backward pass begins inside the step: of a derivative over the cut it would find a part.

        Only what a stage makes itself has its whole graph there. What came over the cut ends at it, and a derivative by
        something older may go on behind it: by an input that is a residual of every layer, by a tied weight.

        Args:
            outputs: what is derived.
            inputs: by what; none: wherever the graph leads.

        Raises:
            CutError: the graph leads to what has been received.
        """
        if self.incoming is None or not self.incoming.numbers:
            return
        targets = [edge_of(each) for each in inputs if self.is_older(each)] if inputs else [(None, 0)]
        if any(isinstance(node, Entry) for target in targets for node in nodes_behind(outputs, target)):
            raise CutError(
                "a backward pass inside the step (torch.autograd.grad, for instance) goes back over the cut before "
                "this stage: it would find a part of the derivative alone.",
                hint="Take the derivative by a tensor that is made on the stage that uses it, inside one layer for "
                "instance (x = x * 1.0), or use one stage.",
            )

    def is_older(self, tensor: Tensor | GradientEdge) -> bool:
        """Whether a tensor of a graph was there before this stage's first layer, for earlier stages to use."""
        node = tensor.node if isinstance(tensor, GradientEdge) else tensor.grad_fn
        leaf = getattr(node, "variable", None if node is not None else tensor)
        if leaf is None:
            return bool(node._sequence_nr() < self._begin)  # type: ignore[union-attr]
        answered = (parameter for module in self.skipped_layers.modules for parameter in module.parameters())
        return self.tracker.leaves_before.get(id(leaf)) is leaf or any(parameter is leaf for parameter in answered)

    def check_copies(self) -> None:
        """Raise if one of two tensors with one memory has changed since the cut at which they became two."""
        for tensor, version, number in self.copied:
            if version_of(tensor) != version:
                raise CutError(
                    f"tensor {number}, {tuple(tensor.shape)}, is changed in place after a cut, and another tensor that "
                    "crosses the cut shares its memory.",
                    hint="Use the out-of-place form, or .clone() one of them.",
                )

    def _come_back(self, name: str, behind: str = "") -> NoReturn:
        """The step calls a layer of an earlier stage: it ends here, and on all later stages.

        Args:
            name: the layer.
            behind: the layer called before it, if it is called for the first time: the order is another one.
        """
        if self.training and behind:
            raise CutError(
                f"layer '{name}' is called behind '{behind}', which follows it in the sequence.",
                hint=f"If every batch calls {behind!r} before {name!r}, name them in that order: layers=[...]. An "
                "order that depends on the batch needs one layer around both, or one device.",
            )
        if self.training:
            raise CutError(
                f"layer '{name}' is called a second time, behind layers that follow it.",
                hint="A training step with n passes over the layers (siamese networks, recursion) needs "
                "PipeStrategy(passes=n); generate() belongs into evaluation steps. Or name another sequence with "
                "layers=... .",
            )
        self.end_again()
        raise EndOfStage

    def end_again(self) -> None:
        """This run is of no use. Those of later stages end where they come to their first call."""
        self.repeats = True
        again = Crossing(RunRecord((CallRecord(AGAIN, (), ()),), ()), {}, (0,))
        self.crossings = {} if self.stage.last else {self.stage.stage + 1: again}

    def _cut(self) -> NoReturn:
        """The next stage's first layer is reached, (5): collect what is alive and end the step."""
        name = self.stage.next_name
        self.tracker.in_place.check_arrays()
        if functorch_active() or forward_ad._current_level >= 0:
            raise CutError(
                f"the cut before layer '{name}' lies inside a transform of torch.func (grad, jvp, vmap, ...) or inside "
                "forward-mode differentiation, of which nothing goes over a cut.",
                hint="Use them inside one layer, or one device.",
            )
        with self.tracker.paused():
            self.crossings = crossings_of(self)
        raise EndOfStage


class _UnderWay(threading.local):
    run: StageRun | None = None


under_way = _UnderWay()
"""Its ``run`` is the run of the step in this thread; where there is none what is replaced in torch does as torch."""
