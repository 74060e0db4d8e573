"""Who has the attributes of layers: what forward passes keep lives with their stage, what the step sets all ranks have.

A layer may count its calls, or keep a list. Its stage alone has that; elsewhere an `AbsentValue` stands for it. The
step's own code may set other attributes. Runs that end early put them back, those of the last stage leave them, and
behind the batch all ranks have what these have left::

    def training_step(self, batch):         stage 0                             stage 1, the last one
        self.head.train()                   put back                            stays
        h = self.layers[0](batch)           counts: self.layers[0].calls = 1    self.layers[0].calls is absent
        loss = self.layers[1](h).mean()     ends at the cut                     counts: self.layers[1].calls = 1
        self.layers[0].scale = 0.9                                              all ranks have it behind the batch

The words of the calls (`digest`) count what is set before them. So it must not depend on other micro-batches, and what
is set behind a layer must not be what its next call computes with.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.intercept.absent_value import AbsentValue
from lightning_pipe.intercept.kept_state import (
    Key,
    Place,
    alike,
    in_several_pipes,
    is_metric,
    is_own,
    now,
    put,
    put_all,
    written,
)
from lightning_pipe.intercept.layer_tensors import IN_A_HOOK, check_held, held_by
from lightning_pipe.intercept.numbers import tokens
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.recompute import is_recomputing
from lightning_pipe.intercept.references import leads_to
from lightning_pipe.intercept.snapshot import MISSING, Change, Snapshot, hook_dictionaries, hooks_of, is_compared

if TYPE_CHECKING:
    from lightning_pipe.intercept.stage_run import StageRun

_kept: WeakKeyDictionary[nn.Module, dict[str, None]] = WeakKeyDictionary()
"""What the calls of modules have changed in them: a second Trainer finds what the first one has left."""


@dataclass(eq=False)
class FirstRun:
    """A run that is to run again.

    Args:
        around: the LightningModule before it.
        formers: of layers, what was there before this run and later ones have set it, and the statistics of norms.
        put_hooks: lets all modules have the hooks that they had before it.
    """

    around: Snapshot
    formers: dict[Key, Any]
    put_hooks: Callable[[], None]


class LayerState:
    """What this rank knows of the attributes of layers and outside modules.

    Args:
        module: the user's module.
        roots: the layers and outside modules by their names.
        stages: by the names of layers, their stages.
        ranks: by stage, in words, who runs it.
        one_pipe: whether all micro-batches take the same way.

    Attributes:
        one_pipe: as given.
        modules: all parts of the module by name.
        root_of: by part of a layer or outside module, its name.
        around: the modules by name whose attributes the complete run of a step decides.
        set_by_run: what the last run's step has set, with what was there before.
        since: see `Digest`.
    """

    def __init__(
        self,
        module: nn.Module,
        roots: Iterable[tuple[str, nn.Module]],
        stages: Mapping[str, int] = MappingProxyType({}),
        ranks: Sequence[str] = (),
        *,
        one_pipe: bool = True,
    ) -> None:
        self.modules = {name: part for name, part in module.named_modules() if not is_metric(type(part))}  # type: ignore[arg-type]
        # by id: a module that the step makes may not be able to tell its hash yet, as torchmetrics' are
        self._names = {id(part): name for name, part in self.modules.items()}
        self._hooks = hook_dictionaries(self.modules.values())
        self.root_of = {part: name for name, root in roots for part in root.modules()}
        self._places, self.one_pipe = (stages, ranks), one_pipe
        # Not outside modules that hold parameters: like layers these really run on every rank that has them. Nor
        # metrics, and torch's own modules.
        found = {name: part for name, part in self.modules.items() if is_own(part) and part not in self.root_of}
        self.around = {"": module, **found}
        # by part, the stage of this rank that runs it
        self._run_here: dict[nn.Module, int] = {}
        self.set_by_run: dict[Key, Any] = {}
        self.since = 0
        self._first = WeakSet[FirstRun]()  # those whose second runs are still to come
        # what was there before complete runs: in the batch under way, and in those that others may not know of yet
        self._left: dict[Key, Any] = {}
        self._late: dict[Key, Any] = {}
        # what calls keep: all of it, and what other ranks do not know of yet
        self._known: dict[Key, None] = {}
        self._learnt: dict[Key, None] = {}

    # ------------------------------------------------------------------ what calls keep

    def runs(self, root: nn.Module, stage: int) -> None:
        """A layer or outside module runs in a stage of this rank."""
        if root not in self._run_here:
            self._run_here.update(dict.fromkeys(root.modules(), stage))

    def keep(self, part: nn.Module, attribute: str) -> bool:
        """A call has changed an attribute of a part of its module. Returns whether none has done so before."""
        _kept.setdefault(part, {})[attribute] = None
        if (part, attribute) in self._known:
            return False
        self._known[part, attribute] = self._learnt[part, attribute] = None
        return True

    def kept(self, root: nn.Module) -> tuple[Place, ...]:
        """What the calls of a module have changed in it so far."""
        if not _kept:
            return ()
        return tuple((path, name) for path, part in root.named_modules() for name in _kept.get(part, ()))

    def is_kept(self, part: nn.Module, attribute: str) -> bool:
        """Whether calls change an attribute."""
        return attribute in _kept.get(part, ())

    def answered(self, root: nn.Module, changing: Sequence[Place], anew: Container[Any]) -> None:
        """The call of a module has been answered, whose calls change some attributes where it runs.

        Args:
            root: the module.
            changing: the attributes.
            anew: among others, those with tensors that the call has set, which are here for the time of the run.
        """
        for place in changing:
            if place[0].startswith("<"):
                continue  # no attribute of the module
            part = root.get_submodule(place[0])
            self.keep(part, place[1])
            if place not in anew:
                self._hide(part, place[1])

    def _hide(self, part: nn.Module, attribute: str) -> None:
        value = now(part, attribute)
        if part not in self._run_here and not isinstance(value, AbsentValue | AbsentTensor):
            put(part, attribute, self._absent(part, attribute, value))

    def _absent(self, part: nn.Module, attribute: str, value: Any) -> Any:
        if attribute in part._buffers:
            return AbsentTensor.like(value) if isinstance(value, Tensor) else value
        root = self.root_of.get(part, "")
        stages, ranks = self._places
        place = ranks[stages[root]] if root in stages else f"the rank that runs '{root}'"
        return AbsentValue(self.written(part, attribute), place)

    def same_stage(self, name: str, part: nn.Module) -> bool:
        """Whether one stage runs a layer and another module."""
        stages, _ = self._places
        return name in stages and stages[name] == stages.get(self.root_of.get(part, ""))

    def on_other_ranks(self, part: nn.Module) -> bool:
        """Whether a module is a part of the user's, and other ranks run some of its stages."""
        return id(part) in self._names and len({*self._places[1]}) > 1

    def written(self, part: nn.Module, attribute: str) -> str:
        """An attribute as code writes it."""
        return written(self._names.get(id(part), ""), attribute)

    # ------------------------------------------------------------------ second runs

    @property
    def run_again(self) -> bool:
        """Whether a run is to find later what the one that goes on now finds, or what was before it."""
        return bool(self._first) and not is_recomputing()

    def begin_first(self) -> FirstRun:
        """A run begins that is to run again."""
        first = FirstRun(Snapshot(self.around), {}, hooks_of(self._hooks))
        self._first.add(first)
        return first

    def note_former(self, part: nn.Module, attribute: str) -> None:
        """The step or a layer is about to set an attribute; what is hidden from this run it does not change."""
        former = now(part, attribute)
        if self.run_again and not isinstance(former, AbsentValue | AbsentTensor):
            for first in self._first:
                first.formers.setdefault((part, attribute), former)

    def has_noted(self, part: nn.Module, attribute: str) -> bool:
        """Whether second runs will find the former value of an attribute."""
        return all((part, attribute) in first.formers for first in self._first)

    @contextmanager
    def restored(self, first: FirstRun) -> Iterator[None]:
        """Around a second run: what has been set or registered since the first one is as this has found it."""
        around, put_hooks = Snapshot(self.around), hooks_of(self._hooks)
        # other micro-batches may have changed these since, and graphs may hold what they are now
        first.around.undo(for_now=True)
        first.put_hooks()
        before = put_all(first.formers)
        try:
            yield
        finally:
            put_all(before)
            put_hooks()
            around.undo()

    # ------------------------------------------------------------------ what the step sets

    def counts(self, part: nn.Module, attribute: str, value: Any) -> bool:
        """Whether it counts who sets an attribute: one of the user's module, with data, and not with its structure."""
        data = attribute == "training" or is_compared(attribute)
        return data and id(part) in self._names and not isinstance(value, nn.Module | nn.Parameter | Callable)

    def setting(self, run: StageRun, part: nn.Module, attribute: str, value: Any) -> None:
        """The step's own code is about to set an attribute of a module.

        Raises:
            CutError: the stage that keeps it does not run this code, or alone has what it is set by.
        """
        if not (attribute == "training" or part in self.root_of):
            return
        key, former = (part, attribute), now(part, attribute)
        if self.is_kept(*key) and self._is_behind(run, self.root_of[part]):
            raise CutError(
                f"the step changes `{self.written(*key)}` behind the layers of its stage, which keeps it and does not "
                "run this code.",
                hint=IN_A_HOOK,
            )
        if isinstance(former, AbsentTensor) and isinstance(value, Placeholder | AbsentTensor):
            raise CutError(
                f"the step sets the buffer `{self.written(*key)}` by its own value, which another rank has.",
                hint=IN_A_HOOK,
            )
        self.set_by_run.setdefault(key, former)
        self.note_former(*key)
        run.tracker.digest.count(self.written(*key), value)

    def _is_behind(self, run: StageRun, name: str) -> bool:
        """Whether the step is behind the stage that runs a layer or outside module, which does not come here."""
        stages, latest = self._places[0], 0
        stage = stages.get(name)
        for called in map(self.root_of.__getitem__, (*run.skipped_layers.modules, *run.layer_calls.ran)):
            if called == name and stage is None:  # an outside module runs where it is called first
                stage = latest
            latest = stages.get(called, latest)
        return run.stage_here is not None and (stage or 0) < latest

    def check_called(self, name: str, root: nn.Module) -> None:
        """The call of a module is answered: its stage has what was there before the batch, or what this run has set.

        Raises:
            CutError: earlier runs have left something else.
        """
        parts = {*root.modules()} if self._left or self._late else ()
        for (part, attribute), former in (*self._left.items(), *self._late.items()):
            if part not in parts or (part, attribute) in self.set_by_run or self.is_kept(part, attribute):
                continue
            if not alike(now(part, attribute), former):
                raise CutError(
                    f"the step changes `{self.written(part, attribute)}` behind '{name}', whose stage has begun with "
                    "other micro-batches by then: they would see an old value.",
                    hint=f"{IN_A_HOOK} Or use micro_batches=1, and no evaluation_micro_batches.",
                )

    @contextmanager
    def of_run(self, run: StageRun) -> Iterator[None]:
        """Around a run of the step: one that ends early puts back what it has set.

        Raises:
            CutError: it has changed something in place, or something at all in one of several pipes.
        """
        counts = not is_recomputing()  # of a second or trial run nothing is to come
        thorough = counts and run.tracker.digest.thorough and run.stage_here == len(self._places[1]) - 1
        held = held_by(self) if thorough else None
        # what the other stages of this rank keep: they may be ahead, or behind
        own = run.stage_here
        others = [] if own is None else [key for key in self._known if self._run_here.get(key[0], own) != own]
        hidden = put_all({key: self._absent(*key, now(*key)) for key in others})
        self.set_by_run = {}
        complete = False
        try:
            yield
            complete = run.complete and counts
        finally:
            for key, former in self.set_by_run.items():
                kept = self.is_kept(*key)
                if complete and kept:
                    self._hide(*key)
                elif complete:
                    self._left.setdefault(key, former)
                elif not (kept and any(key[0] is each for ran in run.layer_calls.ran for each in ran.modules())):
                    put(*key, former)
            put_all(hidden)
        changed = self._changed(self.set_by_run) if complete and not (self.one_pipe or run.tracker.alone) else ()
        for key in changed:
            raise in_several_pipes(self.written(*key))
        if complete and held is not None:
            check_held(held, self)

    # ------------------------------------------------------------------ batches

    def begin_batch(self) -> None:
        """No other batch is under way: all ranks have the same."""
        self._late.clear()
        self.since = next(tokens)

    def take(self) -> list[Change]:
        """What complete runs have changed since this was asked, and what calls have been seen to keep."""
        left, self._left = self._left, {}
        learnt, self._learnt = self._learnt, {}
        changed = {key: None if (value := now(*key)) is MISSING else value for key in self._changed(left)}
        for key in changed:
            self._late.setdefault(key, left[key])
        for key in learnt:
            self._hide(*key)
        found = [Change("set", self._path(key), value) for key, value in changed.items()]
        return [*found, *(Change("hide", self._path(key)) for key in learnt if id(key[0]) in self._names)]

    def _path(self, key: Key) -> tuple[Any, ...]:
        return self._names[id(key[0])], key[1]

    def _changed(self, formers: Mapping[Key, Any]) -> Iterator[Key]:
        for (part, attribute), former in formers.items():
            if not (self.is_kept(part, attribute) or alike(now(part, attribute), former)):
                yield part, attribute

    def adopt(self, change: Change) -> bool:
        """Have what complete runs on another rank have set, and know what calls keep there: whether `take` told of it.

        Args:
            change: one of that rank, behind those of what layers may hold as well, such as a list that has grown.
        """
        name, attribute, *inner = change.path
        part = self.modules.get(name)
        if part is None or inner or not (part in self.root_of or attribute == "training"):
            return False
        if change.kind == "hide":
            _kept.setdefault(part, {})[attribute] = None
            self._hide(part, attribute)
        else:
            put(part, attribute, change.value)
        return True

    def share(self, gather: Callable[[Any], list[Any]]) -> None:
        """Have what layers keep on other ranks: the module is to be whole here. Collective.

        Args:
            gather: brings what each rank gives to all of them.
        """
        own = dict[Any, bytes]()
        for part, attribute in self._known:
            value = vars(part).get(attribute, MISSING)
            here = part in self._run_here and value is not MISSING
            if not here or any(isinstance(each, nn.Module) for each in leads_to(value)):
                continue
            with suppress(Exception):  # what cannot be sent stays absent
                value = value.detach().cpu() if isinstance(value, Tensor) else value
                own[self._path((part, attribute))] = pickle.dumps(value)
        for theirs in gather(own):
            for (name, attribute), data in theirs.items():
                if isinstance(vars(self.modules[name]).get(attribute), AbsentValue):
                    vars(self.modules[name])[attribute] = pickle.loads(data)

    def changed(self) -> Iterator[str]:
        """What the step or calls have changed so far, as code writes it."""
        keys = (*self.set_by_run, *self._left, *self._late, *self._known)
        yield from dict.fromkeys(self.written(*key) for key in keys if key[1] != "training")
