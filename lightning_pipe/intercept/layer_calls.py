"""Runs the layers and outside modules of one stage, and records what other stages must know of each call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.absent_tensor import check_values
from lightning_pipe.intercept.around import Around
from lightning_pipe.intercept.call_record import CallRecord, Read
from lightning_pipe.intercept.contents import Change
from lightning_pipe.intercept.describe import RecordCache
from lightning_pipe.intercept.effects import LOOKS, AttributeSearch, Watch
from lightning_pipe.intercept.inner_hooks import HookedParts, shown
from lightning_pipe.intercept.kept_state import is_packages
from lightning_pipe.intercept.objects import objects_of
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.recompute import is_recomputing, release_saved
from lightning_pipe.intercept.shared_state import Sharing, changed_elsewhere
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.intercept.stage_layers import StageLayers
from lightning_pipe.intercept.state_reads import StateReads
from lightning_pipe.intercept.surroundings import Surroundings
from lightning_pipe.intercept.torch_functions import FLAT
from lightning_pipe.intercept.tracker import Tracker
from lightning_pipe.skip import SkipKey, StepStore, stored_in
from lightning_pipe.torch_internals import graph_nodes, tree_leaves

_AS_IT_IS = nullcontext()
ONCE_FOR_A_BATCH = (
    "Change it in on_train_batch_start or on_train_batch_end, once for a batch; or use a schedule with one pipe, such "
    "as schedule='1f1b'."
)

Stashed = Mapping[SkipKey, Tensor | None]

Profiler = Callable[[str, int, Callable[..., Any], Any, Any, Stashed], None]
"""Called before a layer or outside module runs: name, key (negative outside), forward, arguments, skip tensors."""


Keepers = dict[int, tuple[nn.Module, set[str]]]
"""Parts of modules by ``id``, each with the names of some attributes."""


class Writes(Protocol):
    """What is told who changes attributes of layers and outside modules."""

    def by_read(self, part: nn.Module, name: str) -> None:
        """The step's own code reads an attribute that calls or steps change."""

    def by_call(self, part: nn.Module, name: str) -> None:
        """A call changes an attribute of a part."""

    def by_step(self, part: nn.Module, name: str, *, behind: bool = True) -> None:
        """The step has changed a list, a dictionary or an object in place, which other stages have as well.

        Args:
            part: of this part of a module.
            name: the attribute that refers to it.
            behind: whether that was behind the stage that runs it.
        """


class RunCache:
    """What the runs of one rank keep for later runs.

    Attributes:
        attributes: tells which modules keep tensors as attributes.
        records: the last record of each layer.
        hooked: which parts of modules have forward hooks.
        reads: knows what steps read of layers and outside modules; ``None``: nobody asks.
        looked: the stages, and whether in training, of which a run has shown what it changes.
        run_here: by ``id``, the parts of those that have run on this rank, with the stage.
        sharing: knows what these have in common with others; ``None``: nobody asks.
        around: compares what layers read of modules around them; ``None``: nobody asks.
        writes: told what the calls and the step change in layers and outside modules; ``None``: nobody asks.
        keepers: by ``id``, parts of modules whose attributes calls or steps have changed, and the names of these.
        called: what of these calls have changed, by ``id`` and name.
    """

    def __init__(self) -> None:
        self.reads: StateReads | None = None
        self.looked: set[tuple[int, bool]] = set()
        self.run_here: dict[int, int] = {}
        self.sharing: Sharing | None = None
        self.writes: Writes | None = None
        self.around: Around | None = None
        self.keepers: Keepers = {}
        self.called: set[tuple[int, str]] = set()
        self.attributes, self.records, self.hooked = AttributeSearch(), RecordCache(), HookedParts()
        self._foreign: dict[str, tuple[int, list[tuple[str, nn.Module]]]] = {}

    def note_run(self, root: nn.Module, stage: int) -> None:
        """A layer or outside module runs in a stage of this rank."""
        if id(root) not in self.run_here:
            self.run_here.update((id(part), stage) for part in root.modules())

    def note_keeper(self, part: nn.Module, name: str) -> bool:
        """A call or the step changes an attribute of a part of a module. Returns whether none has done so before."""
        names = self.keepers.setdefault(id(part), (part, set()))[1]
        if name in names:
            return False
        names.add(name)
        return True

    def changing(self, part: nn.Module, name: str, known: bool = True) -> None:
        """A call changes an attribute of a part of its module; ``known``: this rank has the value."""
        self.called.add((id(part), name))
        if self.reads is not None and not is_recomputing():
            self.reads.changed(part, name, here=known)
        if self.writes is not None:
            self.writes.by_call(part, name)

    def kept(self, modules: Iterable[nn.Module] | None = None) -> Snapshot:
        """What modules keep as attributes, as it is now.

        Args:
            modules: all attributes of these; ``None``: those that calls or steps have changed so far.
        """
        if modules is not None:
            return Snapshot({str(id(part)): part for part in modules})
        return snapshot_of(self.keepers)

    def of_steps(self) -> Keepers:
        """The attributes that steps change, and no call; what modules of this package keep, calls change."""
        found = {
            key: (part, {name for name in names if (key, name) not in self.called})
            for key, (part, names) in self.keepers.items()
            if not is_packages(type(part))
        }
        return {key: (part, names) for key, (part, names) in found.items() if names}

    def note_changes(self, changes: Iterable[Change], modules: Iterable[nn.Module]) -> None:
        """Note what has changed since a snapshot of all attributes of some modules."""
        parts = {str(id(part)): part for part in modules}
        for change in changes:
            (_, name), part = change.path[1], parts[change.path[0]]
            if name not in ("_buffers", "training"):
                self.note_keeper(part, name)

    def foreign(self, name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """The modules that a layer or outside module reaches and that are no parts of it, with their names."""
        looks, found = self._foreign.get(name, (0, []))
        if looks < LOOKS and self.sharing is not None:
            reached = self.sharing.foreign(module)
            if self.reads is not None:
                self.reads.watch(part for _, part in reached)
            # of what surrounds the module itself alone: to look at all that is in it would take long
            around = any(self.sharing.surrounds(part, module) for _, part in reached)
            found = [each for each in reached if not around or self.sharing.surrounds(each[1], module)]
            self._foreign[name] = looks + 1, found
        return found


def names_in(keepers: Keepers) -> dict[str, set[str]]:
    """What a snapshot must look at to have some attributes."""
    # a buffer is looked up in the dictionary of all of them
    return {
        str(key): names if names.isdisjoint(part._buffers) else {*names, "_buffers"}
        for key, (part, names) in keepers.items()
    }


def snapshot_of(keepers: Keepers) -> Snapshot:
    """Some attributes as they are now."""
    return Snapshot({str(key): part for key, (part, _) in keepers.items()}, names_in(keepers))


def by_own_value(written: str) -> CutError:
    """With several pipes, the step changes an attribute of a layer by its own value.

    Args:
        written: the attribute as code writes it.
    """
    return CutError(
        f"the step changes `{written}` by its own value, and this schedule has several pipes: none of them runs all "
        "micro-batches, so none has the value that one device has.",
        hint=ONCE_FOR_A_BATCH,
    )


def in_several_pipes(written: str, who: str = "the step") -> CutError:
    """With several pipes, the step or a layer changes an attribute.

    Args:
        written: the attribute as code writes it.
        who: changes it.
    """
    return CutError(
        f"{who} changes `{written}`, and this schedule has several pipes: none of them runs all micro-batches, so "
        "none has the value that one device has.",
        hint=f"{ONCE_FOR_A_BATCH} What is logged is joined.",
    )


class LayerCalls:
    """The calls of this stage's layers and of outside modules in one run of the step.

    Args:
        stage: the stage's layers.
        tracker: that of the run.
        skips: what is stashed and not popped yet.
        surroundings: gives the random streams.
        cache: what earlier runs have kept.
        profiler: measures layers as they are called; ``None``: no measurement.
        objects: whether other ranks can be shown what layers change in objects that they are given.

    Attributes:
        surroundings: those of the run.
        cache: as given.
        inside: whether a layer or outside module runs now.
        ran: those that have run.
        state: what the run reads of modules, and what they change; ``None``: all layers are here.
        routed: the numbers of tensors that go to another stage than the next, with that stage.
    """

    def __init__(
        self,
        stage: StageLayers,
        tracker: Tracker,
        skips: StepStore,
        surroundings: Surroundings,
        cache: RunCache,
        profiler: Profiler | None,
        *,
        objects: bool = False,
    ) -> None:
        self.tracker, self.inside, self.routed = tracker, False, dict[int, int]()
        self.ran: list[nn.Module] = []
        self._stage, self._others, self._objects = stage, not stage.all, objects
        # by layer, the objects that it has changed or made, by ``id``; caches of an earlier generate() must go
        self._kept: dict[str, WeakValueDictionary[int, Any]] = {}
        self._watch: Watch | None = None
        self._around: dict[tuple[int, str], nn.Module] = {}
        self.state = cache.reads.run() if cache.reads is not None and self._others else None
        self._skips, self.surroundings, self.cache, self._profiler = skips, surroundings, cache, profiler

    def run(self, name: str, key: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``forward`` with the random stream of ``key``, and record what the call leaves behind."""
        tracker, cache = self.tracker, self.cache
        given = [*args, *kwargs.values()]
        plain = FLAT.issuperset(map(type, given))  # nothing in them can change
        arguments = given if plain else tree_leaves((args, kwargs))
        tensors = [leaf for leaf in arguments if isinstance(leaf, Tensor)]
        self.inside = True  # what a layer calls, other layers too, belongs to it
        self.ran.append(module)
        self.cache.note_run(module, self._stage.stage)
        try:
            with tracker.paused(), self.surroundings.stream(key), stored_in(self._skips):
                tracker.touch(tensors, name)
                check_values(tensors, f"'{name}'")
                if name in self._kept:
                    tracker.touch(self._moved(name, arguments), name)
                tracker.digest.call(name, arguments, module)
                before = tracker.in_place.noted(tensors)
                skips, events = dict(self._skips), len(self._skips.events)
                if self._profiler is not None:
                    self._profiler(name, key, forward, args, kwargs, skips)
                # With the layers on one stage nobody needs a record: code behind them sees what they leave behind.
                watched = ((), ()) if plain else (given, arguments)
                watch = Watch(name, module, *watched, objects=self._objects) if self._others else None
                self._watch = watch
                if watch is not None and cache.attributes.seeks(name, module):
                    self._seek(watch)
                hooked = cache.hooked.of(module)
                start = graph_nodes()
                with shown(self, name, hooked, arguments) if hooked else _AS_IT_IS:
                    result = forward(*args, **kwargs)
                if watch is not None and plain and not watch.seeks:
                    watch = None  # nothing has been looked at
                # tensors made in between have no number: those that get out other than by the result are an error
                tracker.spans.append((start, graph_nodes()))
                changed = tracker.in_place.changed(before, name)
                release_saved()
                stashed, popped = self._skipped(name, skips, events) if len(self._skips.events) > events else ({}, ())
                call = cache.records.record(tracker, name, result, arguments, changed, stashed, popped, watch)
                if self._around:
                    call = call._replace(reads=self._told())
                tracker.calls.append(call)
                if watch is not None and any(each.object is not None for each in call.effects):
                    kept = self._kept.setdefault(name, WeakValueDictionary())
                    kept.update(watch.kept_objects(call.effects, arguments))
                if watch is not None and watch.seeks:
                    cache.attributes.note(name, module, any(effect.attribute for effect in call.effects))
                    self._note_kept(name, module, watch, call)
        finally:
            self.inside, self._watch = False, None
        return result

    def read(self, part: nn.Module, name: str, answered: Iterable[nn.Module]) -> None:
        """The layer or module that runs now reads an attribute of a module.

        Args:
            part: that module.
            name: the attribute.
            answered: the modules that earlier stages have run in this run of the step.

        Raises:
            CutError: it belongs to another layer, and is not what it is on one device.
        """
        watch, reads, sharing = self._watch, self.cache.reads, self.cache.sharing
        if watch is None or reads is None or sharing is None or sharing.has(watch.module, part):
            return
        root, in_turn = reads.root_of(part), self.cache.run_here.get(id(part)) == self._stage.stage
        seen = in_turn or any(id(each) == root for each in answered) or reads.is_current(part, name)
        if root == -1:
            if not self._stage.last:
                self._around[id(part), name] = part
        elif not (seen and reads.course.one_pipe):
            reads.read_in_call(watch.name, part, name)

    def _told(self) -> tuple[Read, ...]:
        """What the call has read of modules around the layers."""
        found, around = [*self._around.items()], self.cache.around
        self._around.clear()
        told = (around.told(part, name) for (_, name), part in found) if around is not None else ()
        return tuple(read for read in told if read is not None)

    def has_run(self, part: nn.Module) -> bool:
        """Whether a part of a layer or an outside module has run."""
        return any(each is part for module in self.ran for each in module.modules())

    def setting(self, part: nn.Module, name: str, value: Any) -> None:
        """The layer or module that runs now is about to set an attribute of a module.

        A module that has set nothing in its first calls is not searched any more: it is now, while all is as it was.

        Raises:
            CutError: of another module than its own parts.
        """
        watch, sharing = self._watch, self.cache.sharing
        if watch is None or vars(part).get(name) is value:
            return
        if sharing is not None and not sharing.has(watch.module, part):
            if not sharing.may_change(part, last=self._stage.last):
                raise changed_elsewhere(watch.name, sharing.name_of(part), name)
        elif not watch.seeks:
            self._seek(watch)

    def _note_kept(self, name: str, module: nn.Module, watch: Watch, call: CallRecord) -> None:
        """Note what a call has changed in its module.

        Raises:
            CutError: other modules hold that, too, it has changed another module, or there are several pipes.
        """
        cache, sharing = self.cache, self.cache.sharing
        for effect in call.effects:
            if effect.attribute:
                part = module.get_submodule(effect.path)
                cache.changing(part, effect.attribute)
                again = not cache.note_keeper(part, effect.attribute)
                # what it sets once, such as a mask, it may set on each of several ranks
                if effect.kept and again and not self.tracker.alone and cache.reads and not cache.reads.course.one_pipe:
                    raise in_several_pipes(cache.reads.written(part, effect.attribute), f"'{name}'")
            if effect.attribute and sharing is not None and (altered := watch.altered(effect)):
                sharing.check((name, module), effect.place, altered, last=self._stage.last)
        for other, part, attribute in watch.foreign_changes():
            if sharing is not None and not sharing.may_change(part, last=self._stage.last):
                raise changed_elsewhere(name, other, attribute)

    def _moved(self, name: str, arguments: Sequence[Any]) -> list[Tensor]:
        """What a layer keeps in objects that it is given, and code between layers has made anew on another rank.

        Beam search reorders the key-value caches of all layers, on the rank that has chosen the beams.
        """
        ids = self._kept[name]
        kept = [list(vars(each).values()) for each in objects_of(arguments) if id(each) in ids]
        return [leaf for leaf in tree_leaves(kept) if isinstance(leaf, Placeholder)]

    def _seek(self, watch: Watch) -> None:
        """Look for attributes, and note that the call may use the tensors that its module keeps."""
        watch.seek(self.cache.foreign(watch.name, watch.module))
        numbers = map(self.tracker.numbers.of, watch.attributes())
        self.tracker.used.update(number for number in numbers if number is not None)

    def _skipped(
        self, name: str, before: Stashed, events: int
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
