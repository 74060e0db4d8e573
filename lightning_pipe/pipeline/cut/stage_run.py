"""One run of the user's step for one stage: runs local layers, stands in for foreign ones, ends at the cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_pipe.errors import CutError
from lightning_pipe.pipeline.cut.changes import has_changed, state_of, version_of
from lightning_pipe.pipeline.cut.checkpoints import Checkpoint
from lightning_pipe.pipeline.cut.functions import leaves_of, unique
from lightning_pipe.pipeline.cut.holdings import Holdings
from lightning_pipe.pipeline.cut.path import Call, Crossing, Entry, Passed, Path, Repeated, TensorSpec
from lightning_pipe.pipeline.cut.placeholder import Placeholder
from lightning_pipe.pipeline.cut.received import Inbox
from lightning_pipe.pipeline.cut.side_effects import (
    Attributes,
    Keepers,
    Watch,
    container_number,
    containers_in,
    replace_contents,
)
from lightning_pipe.pipeline.cut.tracker import Tracker
from lightning_pipe.pipeline.recompute import release_saved
from lightning_pipe.pipeline.rng import Streams
from lightning_pipe.skip import Key, StepStore, stored_in

_graph_nodes: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""How many nodes autograd has made on this thread: what a layer makes has numbers between those before and after."""

_END = "the end of the step"

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


Stashed = Mapping[Key, Tensor | None]
_NO_SHARING = "Use the out-of-place form, or .clone() one of them."
NO_SKIPPING = (
    "Let the loader leave such batches out, or return a loss of zero that runs the layers: 0.0 * self(x).sum()."
)

Profiler = Callable[[str, int, Callable[..., Any], Any, Any, Stashed], None]
"""Called before a layer or outside module runs: name, key (negative outside), forward, arguments, skip tensors."""


class _EndOfStage(BaseException):
    """Ends the user's step at a cut. Not an ``Exception``: the step's own handlers must not catch it."""


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
        routes: the skip connections that leave this stage for another than the next, with the stage they go to.
        profiler: measures layers as they are called; ``None``: no measurement.
        training: whether a backward pass follows; otherwise the step may leave layers out.
    """

    def __init__(
        self,
        stage: int,
        layers: range,
        total: int,
        names: Sequence[str],
        inbound: tuple[Path, dict[int, Tensor]] | None,
        micro_batch: int,
        streams: Streams,
        holdings: Holdings,
        device: torch.device,
        routes: Mapping[Key, int] | None = None,
        profiler: Profiler | None = None,
        training: bool = True,
    ) -> None:
        self._stage, self.layers, self._total, self._names = stage, layers, total, names
        self.called: set[int] = set()
        self.crossings: dict[int, Crossing] = {}
        self.inside = False
        self.checkpoint: Checkpoint | None = None
        self.inbox: Inbox | None = None
        self._inbound = inbound
        self.skips = StepStore()
        self._routes = routes or {}
        self._routed: dict[int, int] = {}
        self._profiler, self._training = profiler, training
        self._shared: list[tuple[Tensor, int, int]] = []
        self._arguments: dict[tuple[int, int], Tensor] = {}
        self._lenders: list[tuple[Tensor, int | Tensor, int]] = []
        self._borrowed: dict[int, tuple[int, int]] = {}
        self._kept: list[tuple[Tensor, str]] = []
        self._micro_batch, self._streams, self._device = micro_batch, streams, device
        self._holdings = holdings
        self._whole = len(layers) == total
        self._attributes = Attributes()
        self.keepers = Keepers()
        expected = inbound[0].calls if inbound else None
        self.tracker = Tracker(expected, self.stream, holdings, partial=not self._whole)

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
            self._attributes.restore()
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
        if self._training or (last and not waiting) or (waiting and not self.tracker.expects(_END)):
            return
        if waiting:
            self.tracker.expect(_END)
            self.arrive()
        else:
            self.tracker.calls.append(Call(_END, (), ()))
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
                f"the step returned before layer '{self._names[missing]}' was called.",
                hint="Every step must call the whole layer sequence once; name another sequence with layers=... .",
            )
        self.tracker.touch([leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)], "the step's result")
        self.skips.check_empty()

    # ------------------------------------------------------------------ calls that arrive from the user's code

    def call_layer(self, number: int, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A layer of the sequence is called."""
        name = self._names[number]
        if self.tracker.waiting and number < self.layers.start:
            return self._stand_in(name, layer, args, kwargs)
        self.arrive()
        if number >= self.layers.stop:
            self._cut()
        if number < self.layers.start or number in self.called:
            raise CutError(
                f"layer '{name}' is called a second time, or out of order, in one step.",
                hint="A step may run the layer sequence once, in order (siamese networks call it several times); name "
                "another sequence with layers=... or use one device.",
            )
        self.called.add(number)
        return self._execute(name, number, layer, forward, args, kwargs)

    def call_module(
        self, name: str, key: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """A module outside the sequence that has parameters is called."""
        if self.tracker.waiting:
            return self._stand_in(name, module, args, kwargs)
        self._holdings.run(name)
        for parameter in module.parameters():
            self._holdings.use(parameter)
        return self._execute(name, key, module, forward, args, kwargs)

    def _execute(
        self, name: str, key: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        tracker = self.tracker
        arguments = leaves_of(args, kwargs)
        tensors = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
        self.inside = True
        try:
            with tracker.paused(), self.stream(key), stored_in(self.skips):
                tracker.touch(tensors, name)
                before = [
                    (
                        tensor,
                        state_of(tensor, derived=tracker.numbers.derived(tensor)),
                        tracker.in_place.written([tensor]),
                    )
                    for tensor in tensors
                ]
                skips, events = dict(self.skips), len(self.skips.events)
                if self._profiler is not None:
                    self._profiler(name, key, forward, args, kwargs, skips)
                seeks = not self._whole and self.keepers.seeks(name, module)
                given = (*args, *kwargs.values())
                plain = all(isinstance(argument, Tensor) for argument in given)  # nothing in them can change
                watched = seeks or not (self._whole or plain)
                watch = Watch(name, module, given, arguments, seeks) if watched else None
                if seeks and watch is not None:
                    tracker.used.update(n for each in watch.attributes() if (n := tracker.numbers.of(each)) is not None)
                start = _graph_nodes()
                result = forward(*args, **kwargs)
                tracker.spans.append((start, _graph_nodes()))
                changed = [(tensor, written) for tensor, state, written in before if has_changed(tensor, state)]
                tracker.in_place.check_not_lent([tensor for tensor, _ in changed], name)
                release_saved()
                stashed, popped = self._skipped(name, skips, events)
                call = self._describe(name, result, arguments, changed, stashed, popped, watch)
                tracker.calls.append(call)
                if seeks:
                    self.keepers.note(name, module, any(effect.attribute for effect in call.effects))
        finally:
            self.inside = False
        return result

    def stream(self, *key: int) -> AbstractContextManager[None]:
        """The random stream of ``key``, or of the code around; a checkpoint that runs again uses it again."""
        stream = partial(self._streams.isolated, self._micro_batch, *key) if key else nullcontext
        if self.checkpoint is not None:
            self.checkpoint.streams.append(stream)
        return stream()

    def _skipped(self, name: str, before: Stashed, events: int) -> tuple[tuple[Key, ...], tuple[Key, ...]]:
        """The skip connections that a call begins, and those of ``before`` that it ends, by its events.

        One that goes its own way gets a number of its own. A call may end one and begin another under the same key.
        """
        new = self.skips.events[events:]
        if not new:
            return (), ()
        stashed = tuple(key for key in self.skips if any(event == (key, True) for event in new))
        popped = tuple(key for key in before if any(event == (key, False) for event in new))
        self.tracker.touch([tensor for key in popped if (tensor := before[key]) is not None], f"{name} (skip)")
        for key in stashed:
            tensor = self.skips[key]
            if tensor is not None and key in self._routes:
                # a view would keep the tensor alive, and in an evaluation what is alive travels to the next stage
                alias = self.skips[key] = tensor.view_as(tensor) if tensor.requires_grad else tensor.detach()
                self._routed[self.tracker.numbers.give(alias)] = self._routes[key]
        return stashed, popped

    def _describe(
        self,
        name: str,
        result: Any,
        arguments: list[Any],
        changed: list[tuple[Tensor, list[Tensor]]],
        stashed: tuple[Key, ...],
        popped: tuple[Key, ...],
        watch: Watch | None,
    ) -> Call:
        """Number what a layer or module leaves behind and describe it for the stages that stand in for it."""
        leaves, structure = tree_flatten(result)
        leaves += [self.skips[key] for key in stashed]
        effects = [] if watch is None else list(watch.effects(leaves, self.tracker.numbers.derived))
        leaves += [leaf for _, own in effects for leaf in own]
        position_of = {id(argument): i for i, argument in reversed([*enumerate(arguments)])}
        mutated = tuple([position_of[id(tensor)] for tensor, _ in changed])
        unchanged = [None if position in mutated else argument for position, argument in enumerate(arguments)]
        lent: set[int] = set()
        numbered = unique([*(tensor for tensor, _ in changed), *(one for _, written in changed for one in written)])
        described: list[Any] = []
        first: dict[int, int] = {}
        for position, leaf in enumerate(leaves):
            if leaf is None or isinstance(leaf, _PLAIN):
                described.append(leaf)
                continue
            passed = position_of.get(id(leaf))
            if passed is not None:
                described.append(Passed(passed))
            elif first.setdefault(id(leaf), position) != position:
                described.append(Repeated(first[id(leaf)]))
            elif isinstance(leaf, Tensor):
                self.tracker.touch([leaf], f"the result of {name}", new=True)
                lent.update(self.tracker.in_place.lend(leaf, len(self.tracker.calls), unchanged))
                described.append(TensorSpec.of(leaf))
                numbered.append(leaf)
            else:
                raise CutError(
                    f"'{name}' returns a {type(leaf).__qualname__}, which cannot be shown to the next stages.",
                    hint="Return tensors, numbers, strings, None, and tuples, lists or dictionaries of them, or "
                    "register the type with torch.utils._pytree.register_pytree_node.",
                )
        for own_leaf in [own[0] for effect, own in effects if effect.in_place]:
            numbered += self.tracker.in_place.written([own_leaf])[1:]
        kinds = tuple([effect for effect, _ in effects])
        container = None if watch is None else container_number(watch.containers, result)
        numbers, differentiable = self.tracker.numbers.give_all(numbered)
        return Call(
            name,
            numbers,
            differentiable,
            structure,
            tuple(described),
            mutated,
            stashed,
            popped,
            kinds,
            container,
            tuple(sorted(lent)),
        )

    def _stand_in(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Answer for a call that an earlier stage really makes."""
        tracker = self.tracker
        with tracker.paused():
            call = tracker.expect(name)
            arguments = leaves_of(args, kwargs)
            results = tracker.in_place.written([arguments[position] for position in call.mutated])
            tracker.in_place.forget(results, name)
            self._arguments.update({(len(tracker.calls) - 1, position): arguments[position] for position in call.lent})
            kept = self._kept_here(module, call)
            leaves: list[Any] = []
            for number, leaf in enumerate(call.leaves):
                if isinstance(leaf, Passed):
                    leaves.append(arguments[leaf.argument])
                elif isinstance(leaf, Repeated):
                    leaves.append(leaves[leaf.leaf])
                elif isinstance(leaf, TensorSpec):
                    leaves.append(kept[number] if number in kept else Placeholder.of(leaf, self._device))
                    results.append(leaves[-1])
                else:
                    leaves.append(leaf)
            results += [base for tensor in kept.values() for base in tracker.in_place.written([tensor])[1:]]
            tracker.follow(results, call)
            self._kept += [(tensor, name) for tensor in kept.values()]
            for key in call.popped:
                del self.skips[key]
            containers = (
                list(containers_in((*args, *kwargs.values()))) if call.effects or call.container is not None else []
            )
            for effect in reversed(call.effects):
                split = len(leaves) - effect.size
                value = tree_unflatten(leaves[split:], effect.structure)
                del leaves[split:]
                if effect.container is None:
                    self._attributes.set(module, effect, value)
                else:
                    replace_contents(containers[effect.container], value)
            if call.stashed:
                self.skips.update(zip(call.stashed, leaves[-len(call.stashed) :], strict=True))
                del leaves[-len(call.stashed) :]
            result = tree_unflatten(leaves, call.structure)
            return result if call.container is None else containers[call.container]

    def _kept_here(self, module: nn.Module, call: Call) -> dict[int, Tensor]:
        """Attributes of a foreign layer that change in place there: by the number of their leaf the tensors held here.

        They stay what they are until their values come, and must come before they are used.
        """
        kept: dict[int, Tensor] = {}
        number = len(call.leaves)
        for effect in reversed(call.effects):
            number -= effect.size
            if not effect.in_place:
                continue
            leaf = call.leaves[number]
            place = leaf.leaf if isinstance(leaf, Repeated) else number
            spec = call.leaves[place]
            tensor = self._attributes.same(module, effect, spec) if isinstance(spec, TensorSpec) else None
            if tensor is not None:
                kept[place] = tensor
        return dict(reversed(kept.items()))

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
            self.inbox = Inbox([values[entry.number] for entry in entries], [entry.requires_grad for entry in entries])
            self.inbox.tensors.reverse()
            kept = {
                self.tracker.numbers.of(tensor): tensor for tensor, name in self._kept if self._holdings.may_run(name)
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
                    self._attributes.filled(own, value if copy is None else copy)
            self._miss_kept(values)
            alive = dict(self.tracker.numbers.alive())
            self._shared = [
                (alive[entry.number], version_of(alive[entry.number]), entry.number)
                for entry in entries
                if entry.shared and entry.number in alive
            ]

    def _borrow(self, number: int, lender: tuple[int, int]) -> None:
        """A tensor has come that is a copy here of memory which this stage has for itself."""
        own = self._arguments.get(lender)
        if own is not None and not self.tracker.numbers.derived(own):
            self._lenders.append((own, state_of(own, derived=False), number))
            self._borrowed[number] = lender

    def _miss_kept(self, values: Mapping[int, Tensor]) -> None:
        """What a layer changed in place in its attributes, and did not come, must not be used."""
        for tensor, name in self._kept:
            number = self.tracker.numbers.of(tensor)
            if number is not None and number not in values and not isinstance(tensor, Placeholder):
                self.tracker.numbers.unfilled[number] = (
                    f"'{name}' changes it in place on an earlier stage, which did not send it: in the first batch of "
                    "this shape nothing needed it."
                )

    def _cut(self) -> None:
        """The next stage's first layer is reached: collect what is alive and end the step."""
        around = self.checkpoint
        if around is not None and around.reentrant and around.begin < len(self.tracker.calls):
            raise CutError(
                f"the cut before layer '{self._names[self.layers.stop]}' lies inside a checkpoint with "
                "use_reentrant=True, which computes without gradients at first: none would come back over the cut.",
                hint="Use use_reentrant=False, or one checkpoint for every layer.",
            )
        with self.tracker.paused():
            alive = [
                (number, tensor)
                for number, tensor in sorted(self.tracker.numbers.alive(), key=lambda pair: pair[0])
                if not isinstance(tensor, (Placeholder, nn.Parameter)) and number not in self.tracker.numbers.unfilled
            ]
            # What came as copies of one memory still stands for one memory where it goes next.
            shared = overlapping([tensor for _, tensor in alive]) | {id(tensor) for tensor, *_ in self._shared}
            following = self._stage + 1
            leaving: dict[int, list[tuple[Entry, Tensor]]] = {following: []}
            for number, tensor in alive:
                lender = self.tracker.in_place.lender_of(tensor) or self._borrowed.get(number)
                entry = _entry(number, tensor, id(tensor) in shared, lender)
                leaving.setdefault(self._routed.get(number, following), []).append((entry, tensor))
            calls = tuple(self.tracker.calls)
            for to, pairs in leaving.items():
                path = Path(calls, tuple(entry for entry, _ in pairs))
                self.crossings[to] = Crossing(path, tuple(tensor for _, tensor in pairs))
        raise _EndOfStage


def overlapping(tensors: Sequence[Tensor]) -> set[int]:
    """Those that share memory with another, by ``id``. To come out of one message is not to share memory."""
    by_storage: dict[int, list[tuple[int, int, int]]] = {}
    for tensor in tensors:
        if tensor.numel():
            start = int(tensor.storage_offset()) * tensor.itemsize
            extent = 1 + sum((int(n) - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            place = (start, start + extent * tensor.itemsize, id(tensor))
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(place)
    found: set[int] = set()
    for places in by_storage.values():
        reached, last = 0, 0
        for start, end, tensor_id in sorted(places):
            if start < reached:
                found |= {last, tensor_id}
            if end > reached:
                reached, last = end, tensor_id
    return found


def _is_generating(error: CutError) -> bool:
    """Whether an error comes from code that generates token by token."""
    return any(frame.f_code.co_name == "generate" for frame, _ in walk_tb(error.__traceback__))


def _entry(number: int, tensor: Tensor, shared: bool, lender: tuple[int, int] | None) -> Entry:
    spec = TensorSpec.of(tensor)
    # A view made under no_grad says that it requires a gradient and has none to give (torch 2.13).
    detached = tensor._is_view() and tensor.grad_fn is None
    shared = shared or lender is not None or spec.overlaps
    return Entry(number, spec, tensor.requires_grad and not detached, shared, lender)
