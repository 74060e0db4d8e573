"""Runs the layers and outside modules of one stage, and records what other stages must know of each call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import CallRecord, Unseen
from lightning_pipe.intercept.describe import described
from lightning_pipe.intercept.effects import Watch
from lightning_pipe.intercept.in_place import Noted
from lightning_pipe.intercept.inner_hooks import Parts, shown
from lightning_pipe.intercept.kept_state import Place, in_several_pipes, is_own, written
from lightning_pipe.intercept.layer_state import LayerState
from lightning_pipe.intercept.layer_tensors import IN_A_HOOK, changed_elsewhere, check_not_shared
from lightning_pipe.intercept.objects import objects_of
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.recompute import found_changed, release_saved
from lightning_pipe.intercept.references import Label, References
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.intercept.stage_layers import StageLayers
from lightning_pipe.intercept.tensor_state import copy_of, counting, same_values
from lightning_pipe.intercept.torch_functions import FLAT, keywords_of, unique
from lightning_pipe.intercept.tracker import Tracker
from lightning_pipe.local_parts import local
from lightning_pipe.skip import SkipKey, StepStore
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.torch_internals import graph_nodes, is_compiled, tree_leaves

if TYPE_CHECKING:
    from lightning_pipe.intercept.stage_run import StageRun
    from lightning_pipe.parameters.ownership import Ownership


class RunCache:
    """What the runs of one rank have in common, and keep for later ones.

    Args:
        state: knows who has the attributes of layers and outside modules.
        parameter_use: the module's parameters and buffers outside layers.
        device: the device that placeholders report.

    Attributes:
        state, parameter_use, device: as given.
        keeping: the layers and outside modules that have been seen to keep tensors as attributes.
        records: the last record of each layer.
        elsewhere: by layer or outside module, what its calls change outside of it, such as globals.
    """

    def __init__(self, state: LayerState, parameter_use: Ownership, device: torch.device) -> None:
        self.state, self.parameter_use, self.device = state, parameter_use, device
        self.keeping, self.records = set[str](), dict[str, CallRecord]()
        self.elsewhere: defaultdict[str, dict[Label, None]] = defaultdict(dict)
        self._registered, self._hooked = -1, dict[int, Parts]()

    def hooked(self, module: nn.Module) -> Parts:
        """The parts with forward hooks in a module, by paths; none of compiled code, which a hook would interrupt."""
        if RemovableHandle.next_id != self._registered:  # torch counts all hooks that are registered
            self._registered, self._hooked = RemovableHandle.next_id, {}
        found = self._hooked.get(id(module))
        if found is None:
            parts = [(path, part) for path, part in module.named_modules() if path and part._forward_hooks]
            compiled = parts and any(map(is_compiled, module.modules()))
            found = self._hooked[id(module)] = [] if compiled else parts
        return found


class LayerCalls:
    """The calls of this stage's layers and of outside modules in one run of the step.

    Args:
        stage: the stage's layers.
        tracker: that of the run.
        skips: what is stashed and not popped yet.
        cache: what earlier runs have kept.

    Attributes:
        tracker, cache: as given.
        ran: those that have run.
        routed: the numbers of tensors that go to another stage than the next, with that stage.
    """

    def __init__(self, stage: StageLayers, tracker: Tracker, skips: StepStore, cache: RunCache) -> None:
        self.tracker, self.routed = tracker, dict[int, int]()
        self.ran: list[nn.Module] = []
        self._stage, self._others = stage, tracker.partial
        self._again = cache.state.run_again
        self._kept: Mapping[int, Any] = {}  # objects that layers here have changed or made, by ``id``, held weakly
        # the module that runs where other stages must know what it leaves behind, what looks at it, and, in a thorough
        # run, what its code names
        self._running: tuple[str, nn.Module] | None = None
        self._watch: Watch | None = None
        self._references: References | None = None
        self._skips, self.cache = skips, cache

    def run(self, name: str, key: tuple[int, ...], module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Call ``forward`` with the random stream of ``key``, and record what the call leaves behind."""
        if torch.is_inference_mode_enabled():
            return counting()(self.run)(name, key, module, forward, args, kwargs)
        tracker, cache = self.tracker, self.cache
        given = [*args, *kwargs.values()]
        flat = FLAT.issuperset(map(type, given))
        arguments = given if flat else tree_leaves((args, kwargs))
        # nothing in them can change; a pair of tensors is what most layers of language models are given (RoPE)
        plain = flat or all(FLAT.issuperset(map(type, each if type(each) is tuple else (each,))) for each in given)
        tensors = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
        if key[0] < 0:  # an outside module
            cache.parameter_use.run(name)
            for parameter in module.parameters():
                cache.parameter_use.use(parameter)
        self.ran.append(module)
        cache.state.runs(module, self._stage.stage)
        around = self._running, self._watch, self._references  # a hook on a part of a layer may call others
        try:
            with tracker.paused(), tracker.surroundings.stream(*key):
                tracker.touch(tensors, name)
                if self._others and self._kept:
                    tracker.touch(self._moved(arguments), name)
                tracker.digest.call(name, arguments, () if flat and not kwargs else keywords_of(args, kwargs), module)
                before = tracker.in_place.noted(tensors)
                skips, events = dict(self._skips), len(self._skips.events)
                # With the layers on one stage nobody needs a record: code behind them sees what they leave behind.
                if self._others or self._again:
                    self._begin(name, module, () if plain else given, arguments)
                values = [copy_of(local(p)) for p in module.parameters()] if self._again and self._references else []
                hooked = cache.hooked(module)
                start = graph_nodes()
                if hooked:
                    with shown(tracker, name, hooked, arguments):
                        result = forward(*args, **kwargs)
                else:
                    result = forward(*args, **kwargs)
                if self._again:
                    self._check_unchanged(name, module, values)
                # tensors made in between have no number: those that get out other than by the result are an error
                tracker.spans.append((start, graph_nodes()))
                changed = tracker.in_place.changed(before, name)
                release_saved()
                stashed, popped = self._skipped(name, skips, events) if len(self._skips.events) > events else ({}, ())
                call = self._recorded(name, result, arguments, changed, stashed, popped)
                tracker.calls.append(self._noted(name, module, call) if self._others else call)
                if self._watch is not None and any(each.state is not None for each in call.effects):
                    kept = self._watch.kept_objects(call.effects, arguments)
                    self._kept = WeakValueDictionary({**self._kept, **kept})
        finally:
            self._running, self._watch, self._references = around
        return result

    def _begin(self, name: str, module: nn.Module, given: Sequence[Any], arguments: Sequence[Any]) -> None:
        """Look at what a call changes from here on.

        Args:
            name: the layer or outside module.
            module: the module.
            given: what it is given, unless nothing in that can change.
            arguments: the leaves of that.
        """
        self._running, digest = (name, module), self.tracker.digest
        self._references = references = (
            References(name, module, self.cache.state, arguments) if digest.thorough else None
        )
        if references is not None and not digest.idle:
            references.before = digest.referred(references.values())
        self._watch = None
        if self._others and given:
            self._watch = Watch(name, module, given, arguments)
        if references is not None or (self._others and name in self.cache.keeping):
            self._seek()

    def _recorded(
        self,
        name: str,
        result: Any,
        arguments: Sequence[Any],
        changed: Sequence[Noted],
        stashed: Mapping[SkipKey, Tensor | None],
        popped: tuple[SkipKey, ...],
    ) -> CallRecord:
        """Number what a call leaves behind, and describe it; one that leaves the same as the last gets its record.

        Args:
            name: the layer or outside module.
            result: what it returned.
            arguments: the leaves of what it was given.
            changed: those that it has changed in place.
            stashed: the skip connections that begin in the call.
            popped: those that end in it.

        Raises:
            CutError: it returned something that is no tensor and no plain value.
        """
        tracker, watch, records = self.tracker, self._watch, self.cache.records
        # A full description costs more than a small layer computes, and most layers leave one new tensor behind.
        usual = type(result) is Tensor and not (changed or stashed or popped) and watch is None
        last = records.get(name) if usual else None
        if last is not None and _again(last, tracker, result, arguments):
            tracker.numbers.bind(result, last.numbers[0])
            return last
        left = [] if watch is None else [*watch.effects(tracker)]
        whole = (result, [*stashed.values()], [value for _, value in left]) if stashed or left else result
        structure, leaves, new = described(whole, arguments)
        for leaf in leaves:
            if isinstance(leaf, Unseen):
                raise CutError(
                    f"'{name}' returns a {leaf.kind}, which cannot be shown to the next stages.",
                    hint="Return tensors, numbers, strings, None, and tuples (named ones too), lists or dictionaries "
                    "of them, or register the type with torch.utils._pytree.register_pytree_node.",
                )
        tracker.touch(new, f"the result of {name}", new=True)
        mutated = tuple([next(at for at, each in enumerate(arguments) if each is tensor) for tensor, *_ in changed])
        # the record says already that these change: their memory needs no lender
        others = [(at, owner) for at, owner in enumerate(arguments) if at not in mutated]
        owners = [*others, *(() if watch is None else watch.attributes())]
        lent = {at for leaf in new for at in tracker.in_place.lend(leaf, owners)}
        also = [*(tensor for tensor, *_ in changed), *(one for *_, behind in changed for one in behind)]
        numbers, differentiable = tracker.numbers.give_all(unique(also) + new if also else new)
        call = CallRecord(
            name,
            numbers,
            differentiable,
            structure,
            leaves,
            mutated,
            tuple(stashed),
            popped,
            tuple([effect for effect, _ in left]),
            None if watch is None else next((at for at, each in enumerate(watch.containers) if each is result), None),
            tuple(sorted(lent, key=str)),
        )
        if usual and not lent and isinstance(leaves[0], TensorSpec):
            records[name] = call
        return call

    def _noted(self, name: str, module: nn.Module, call: CallRecord) -> CallRecord:
        """The record of a call with what the calls of its module change; the rest of what its code names counts."""
        if (watch := self._watch) is not None and watch.kept is not None:
            self.cache.keeping.update(name for effect in call.effects if not isinstance(effect.where, int))
            self._note_kept(name, module, watch, watch.kept)
        elsewhere = self.cache.elsewhere[name]
        before = None if self._references is None else self._references.before
        if self._references is not None and before is not None:
            now = self.tracker.digest.referred(self._references.values())
            elsewhere |= {each: None for each in now if each[0].startswith("<") and now[each] != before.get(each)}
        if changing := (*self.cache.state.kept(module), *elsewhere):
            call = call._replace(changing=changing)
        if before is not None:
            self.tracker.digest.refer(before, call.changing)
        return call

    def setting(self, run: StageRun, part: nn.Module, name: str, value: Any) -> None:
        """The step's own code, or the layer or module that runs now, is about to set an attribute of a module.

        A module that has set nothing in thorough runs is not searched in others: it is now, while all is as it was.

        Raises:
            CutError: a module sets it in another one, the step exchanges or adds a part; or see `LayerState.setting`.
        """
        state, inside = self.cache.state, self.tracker.surroundings.inside
        if isinstance(value, nn.Module) and part in state.root_of and not (inside or part._modules.get(name) is value):
            raise CutError(f"the step exchanges `{state.written(part, name)}`, a part of a layer.", hint=IN_A_HOOK)
        if not inside and isinstance(value, nn.Module | nn.Parameter) and run.training:
            self._check_added(part, name, [value] if isinstance(value, nn.Parameter) else value.parameters())
        if not state.counts(part, name, value):
            return
        if not inside:
            state.setting(run, part, name, value)
            return
        if self._running is None or vars(part).get(name) is value:
            return
        running, module = self._running
        if all(part is not each for each in module.modules()):
            if not self._may_change(part):
                raise changed_elsewhere(running, state.written(part, name))
            return
        state.note_former(part, name)
        if not (state.one_pipe and state.is_kept(part, name)):
            self._seek()

    def _check_added(self, part: nn.Module, name: str, parameters: Iterable[nn.Parameter]) -> None:
        """Refuse what the step adds to the user's module with parameters that other ranks would not get."""
        state, known = self.cache.state, self.cache.parameter_use.name_of
        if state.on_other_ranks(part) and any(known(each) is None for each in parameters):
            what = f"the step adds `{state.written(part, name)}`, and other ranks do not get its parameters."
            raise CutError(what, hint="Create it in __init__ or configure_model.")

    def _may_change(self, part: nn.Module) -> bool:
        """Whether a call may change what is no part of its module: the last stage completes the step."""
        return self._stage.last and part not in self.cache.state.root_of

    def _note_kept(self, name: str, module: nn.Module, watch: Watch, kept: Snapshot) -> None:
        """Note what a call has changed in its module.

        Raises:
            CutError: other modules hold that, too, it has changed another module, or there are several pipes.
        """
        state = self.cache.state
        for place, _, altered in kept.altered():
            part = module.get_submodule(place[0])
            again = not state.keep(part, place[1])
            # what it sets once, such as a mask, it may set on each of several ranks; losses it sets in each call
            if again and not (self.tracker.alone or state.one_pipe or _is_for_now(place, part, watch)):
                raise in_several_pipes(state.written(part, place[1]), f"'{name}'")
            if changed := [each for each in altered if not isinstance(each, Tensor)]:
                others = [each for each in state.modules.items() if not self._may_change(each[1])]
                check_not_shared(name, module, place, changed, others)
        for (other, attribute), *_ in watch.foreign.altered():
            if not self._may_change(state.modules[other]):
                raise changed_elsewhere(name, written(other, attribute))

    def _check_unchanged(self, name: str, module: nn.Module, values: Sequence[Tensor]) -> None:
        """Refuse what a layer whose forward pass runs again has changed unseen: the second run would find it.

        Of its parameters, whose ``.data`` nobody counts, their former ``values`` tell, if there are any.
        """
        if not all(map(same_values, map(local, module.parameters()), values)):
            raise found_changed(f"a parameter of '{name}'")
        state, kept = self.cache.state, None if self._watch is None else self._watch.kept
        for (path, attribute), known, in_place in () if kept is None else kept.altered():
            part = module.get_submodule(path)
            if not known or attribute in part._buffers:
                continue  # of buffers `BufferGuard` tells
            unseen = not state.has_noted(part, attribute)
            if in_place or (unseen and state.counts(part, attribute, vars(part).get(attribute))):
                raise found_changed(f"`{written(name, path, attribute)}`")

    def _moved(self, arguments: Sequence[Any]) -> list[Tensor]:
        """What layers here keep in objects that one is given, and code between layers has made anew on another rank.

        Beam search reorders the key-value caches of all layers, on the rank that has chosen the beams.
        """
        kept = [list(vars(each).values()) for each in objects_of(arguments) if id(each) in self._kept]
        return [leaf for leaf in tree_leaves(kept) if isinstance(leaf, Placeholder)]

    def _seek(self) -> None:
        """Look for attributes, and note that the call may use the tensors that its module keeps."""
        if self._running is None or (self._watch is not None and self._watch.kept):
            return
        watch = self._watch = self._watch or Watch(*self._running, (), ())
        reached = () if self._references is None else self._references.reached
        parts = self.cache.state.modules if reached else {}
        watch.seek({name: part for name, part in parts.items() if part in reached and is_own(part)})
        numbers = (self.tracker.numbers.of(tensor) for _, tensor in watch.attributes())
        self.tracker.used.update(number for number in numbers if number is not None)

    def _skipped(
        self, name: str, before: Mapping[SkipKey, Tensor | None], events: int
    ) -> tuple[dict[SkipKey, Tensor | None], tuple[SkipKey, ...]]:
        """The skip connections that a call begins, and those of ``before`` that it ends, by its events.

        One that goes its own way gets a number of its own. A call may end one and begin another under the same key.
        """
        new = self._skips.events[events:]
        stashed = {key: tensor for key, tensor in self._skips.items() if (key, True) in new}
        popped = tuple(key for key in before if (key, False) in new)
        self.tracker.touch([tensor for key in popped if (tensor := before[key]) is not None], f"{name} (skip)")
        for key, tensor in stashed.items():
            if tensor is not None and key in self._stage.routes:
                # a view would keep the tensor alive, and in an evaluation what is alive travels to the next stage
                alias = tensor.view_as(tensor) if tensor.requires_grad else tensor.detach()
                self._skips[key] = stashed[key] = alias
                self.routed[self.tracker.numbers.give(alias)] = self._stage.routes[key]
        return stashed, popped


def _is_for_now(place: Place, part: nn.Module, watch: Watch) -> bool:
    """Whether the tensor that a call has set is none that later calls go on from: a loss, or the first or same one."""
    value = vars(part).get(place[1])
    if not isinstance(value, Tensor):
        return False
    former = dict(watch.attributes()).get(place, value)
    return value.requires_grad or not torch.is_grad_enabled() or same_values(former, value)


def _again(last: CallRecord, tracker: Tracker, result: Tensor, arguments: Sequence[Any]) -> bool:
    """Whether a call has returned one new tensor as the ``last`` one of its name did."""
    spec: TensorSpec = last.leaves[0]
    return (
        tracker.numbers.following == last.numbers[0]
        and result.shape == spec.shape
        and result.dtype == spec.dtype
        and spec.strides is None
        and result.is_contiguous()
        and result.requires_grad == last.differentiable[0]
        and result._base is None
        and tracker.numbers.of(result) is None
        # without a graph, in an evaluation, it may be an argument, or share the memory of one
        and (
            not result.is_leaf
            or not (
                any(result is argument for argument in arguments) or tracker.in_place.lend(result, enumerate(arguments))
            )
        )
    )
