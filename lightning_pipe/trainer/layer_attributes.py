"""Attributes of layers and outside modules that the step's own code sets: made equal on all ranks.

What a layer does to itself in its forward pass, and what its hooks do to it, such as those of weight norm, stays where
it is called. The step may set its attributes as well::

    def validation_step(self, batch, batch_idx):
        self.model.train()              # every rank runs this
        samples = self.model(batch)     # all ranks but the last end their run of the step in here,
        self.model.eval()               # and never come to this

What a call changes that the step has set before is the call's from then on, where the layer runs. What the step sets
or changes in place behind the stage that keeps it comes there with the report of the batch: too late if that stage has
run other micro-batches meanwhile.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.kept_state import filled, shown
from lightning_pipe.intercept.shared_state import written
from lightning_pipe.intercept.snapshot import Change, is_compared
from lightning_pipe.patches import replaced

_CALL = nn.Module.__call__.__code__
_MISSING = object()
_PLAIN = (int, float, str, bytes, type(None))

Key = tuple[str, str]
"""The names of a module and of an attribute."""
Former = dict[Key, Any]
"""What attributes were before they were set."""


class _Set(NamedTuple):
    """What a complete run has set: the former value, the new one, and whether that was behind the module's stage."""

    former: Any
    value: Any
    behind: bool


class Runs(Protocol):
    """What knows the run of the step that is under way."""

    @property
    def in_module(self) -> bool:
        """Whether a layer or an outside module runs now: what that sets is its own."""

    def setting(self, part: nn.Module, name: str, value: Any) -> None:
        """One is about to set an attribute."""

    def note_set(self, part: nn.Module, name: str) -> None:
        """The step is about to set an attribute of one."""

    def is_behind(self, part: nn.Module, name: str | None = None) -> bool:
        """Whether the step is behind the stage that runs a module; with a name, if calls change the attribute there."""

    def changed_elsewhere(self, part: nn.Module, name: str) -> bool:
        """Calls on any rank have changed an attribute. Returns whether this rank does not know the value of now."""

    def hide(self, part: nn.Module, name: str) -> None:
        """Calls have changed an attribute of which this rank cannot have the value, unless it runs them all."""

    @property
    def one_pipe(self) -> bool:
        """Whether all micro-batches take the same way."""

    def has_run(self, part: nn.Module, *, now: bool = False) -> bool:
        """Whether this rank has run a module; ``now``: in the run that ends."""


class LayerAttributes:
    """Notes what steps set in layers and in modules outside the sequence that hold parameters.

    Args:
        modules: all parts of them, by name.
        runs: knows the run of the step that is under way.
        others: the other modules of the user's module, by name: of these the mode counts (``training``).

    Attributes:
        modules: all of them, by name.
        changes_adopted: how often another rank has changed an attribute on this one so far.
        latest: those that the last run of the step has set here.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], runs: Runs, others: Mapping[str, nn.Module] | None = None
    ) -> None:
        both = {**modules, **(others or {})}
        self.modules = {name: module for name, module in both.items() if not isinstance(module, Metric)}
        self._all = {id(module): name for name, module in self.modules.items()}
        self._names = {key: name for key, name in self._all.items() if name in modules}
        self._runs = runs
        self._noted: Former | None = None
        self._followed = False
        self._complete: dict[Key, _Set] = {}
        # of what is noted, that which has been set behind the stage of its module
        self._behind: set[Key] = set()
        # what complete runs on other ranks have set there
        self._set_behind: set[Key] = set()
        # where runs ahead of the others have set something: what complete runs have left there
        self._agreed: Former = {}
        # what calls have changed: in this run, and in complete ones, with the values
        self._called: set[Key] = set()
        self._kept: Former = {}
        self.changes_adopted = 0
        self._last_change: dict[str, int] = {}  # which of them was the last one of each attribute, as code writes it
        self.latest: set[str] = set()

    def installed(self) -> AbstractContextManager[None]:
        """Around a run of the Trainer: see what is set in modules."""
        setting = nn.Module.__setattr__

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            if self._noted is not None and id(module) in self._all and _counts(name, value):
                if self._runs.in_module:
                    self._runs.setting(module, name, value)
                elif id(module) in self._names or name == "training":
                    self._note(module, name, value, self._noted)
            setting(module, name, value)

        return replaced(nn.Module, "__setattr__", set_attribute, gated=False)

    def _note(self, module: nn.Module, name: str, value: Any, noted: Former) -> None:
        """The step is about to set an attribute."""
        key = (self._all[id(module)], name)
        former = _holder(module, name).get(name, _MISSING)
        changed = self._followed and not _is_same(former, value)
        # what each run sets before the layers, too, is alike for all micro-batches unless calls change it
        if changed and self._runs.is_behind(module, name if key in noted else None):
            raise _too_late(*key)
        if key not in noted:
            if self._in_a_call():
                return
            noted[key] = former
            if id(module) in self._names:
                self._runs.note_set(module, name)
        (self._behind.add if self._runs.is_behind(module) else self._behind.discard)(key)

    def _in_a_call(self) -> bool:
        """Whether one of the modules is being called: its hooks run around its forward pass."""
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            if frame.f_code is _CALL and id(frame.f_locals["self"]) in self._names:
                return True
            frame = frame.f_back
        return False

    @contextmanager
    def noting(self, complete: Callable[[], bool], *, undo: bool, followed: bool = False) -> Iterator[None]:
        """Around a run of the step.

        Args:
            complete: asked behind it whether it counts; what it has set is for the other ranks then.
            undo: whether what another run has set is to be put back.
            followed: whether earlier stages run other micro-batches before they learn what it has set.
        """
        noted: Former = {}
        self._noted, self._followed = noted, followed
        self._behind.clear()
        self._called.clear()
        try:
            yield
        finally:
            self._noted = None
            self.latest = {written(*key) for key in noted}
            if complete():
                self._kept.update((key, vars(self.modules[key[0]]).get(key[1])) for key in self._called)
                for key, former in noted.items():
                    value = _holder(self.modules[key[0]], key[1]).get(key[1], former)
                    before = self._complete[key].former if key in self._complete else former
                    self._complete[key] = _Set(before, value, key in self._behind)
            elif undo:
                self._put_back(noted)

    def _put_back(self, former: Former) -> None:
        """Later runs go on with what has been set in a module that runs here, unless the step sets it once more."""
        for key, value in former.items():
            module, name = key
            holder = _holder(self.modules[module], name)
            if key not in self._set_behind and self._runs.has_run(self.modules[module], now=True):
                self._agreed.setdefault(key, value)
                continue
            if value is _MISSING:
                holder.pop(name, None)
            else:
                holder[name] = value

    def by_call(self, part: nn.Module, name: str) -> None:
        """A call changes an attribute: what the step had set there is the past, and not to be put back either."""
        if id(part) not in self._names:
            return
        key = self._names[id(part)], name
        if self._noted is not None:
            self._noted.pop(key, None)
            if name not in part._buffers:
                self._called.add(key)
        self._complete.pop(key, None)

    def by_step(self, part: nn.Module, name: str) -> None:
        """A complete run has changed a list, a dictionary or an object in place, of a stage that does not run it.

        Raises:
            CutError: that stage runs other micro-batches before it learns of it.
        """
        if id(part) in self._names:
            key = self._names[id(part)], name
            if self._followed:
                raise _too_late(*key)
            self._runs.note_set(part, name)
            self._complete[key] = _Set(_MISSING, copy.deepcopy(vars(part)[name]), behind=True)

    def changes(self) -> list[Change]:
        """What complete runs have set since this was asked, and what calls have changed.

        What was set comes always if it is a number or the like, as other ranks may differ.
        """
        complete, self._complete = self._complete, {}
        found = []
        for (module, name), (former, value, behind) in complete.items():
            if isinstance(value, _PLAIN) or value is not former:
                found.append(Change("set", (module, ("attribute", name)), value, everywhere=behind))
        kept, self._kept = self._kept, {}
        for (module, name), value in kept.items():
            data = shown(value) if self._runs.one_pipe and not isinstance(value, Tensor) else None
            found.append(Change("hide" if data is None else "keep", (module, ("attribute", name)), data))
        self.adopt(found)  # a rank with several stages has put back what its last one has set
        return found

    def others(self, changes: Sequence[Change]) -> list[Change]:
        """The changes that concern other modules, or what is in their attributes."""
        return [change for change in changes if not self._concerns(change)]

    def _concerns(self, change: Change) -> bool:
        name, (_, attribute), *inner = change.path
        part = self.modules.get(name)
        return part is not None and not inner and (id(part) in self._names or attribute == "training")

    def adopt(self, changes: Sequence[Change]) -> None:
        """Have what another rank's complete runs have set, and what calls have changed."""
        for change in filter(self._concerns, changes):
            module, (_, name) = change.path
            if change.kind == "hide":
                self._runs.hide(self.modules[module], name)
            elif change.kind == "keep":
                if self._runs.changed_elsewhere(self.modules[module], name):
                    vars(self.modules[module])[name] = pickle.loads(change.value)
            elif change.everywhere or not self._runs.has_run(self.modules[module]):
                if change.everywhere:
                    self._set_behind.add((module, name))
                self._set(module, name, change.value)
            elif (module, name) in self._agreed:
                self._agreed[module, name] = change.value

    def _set(self, module: str, name: str, value: Any) -> None:
        held = _holder(self.modules[module], name)
        before = self._agreed.pop((module, name), held.get(name, _MISSING))
        if not _is_same(held.get(name, _MISSING), value) and not filled(held.get(name), value):
            held[name] = value
        if not _is_same(before, value):
            self.changes_adopted += 1
            self._last_change[written(module, name)] = self.changes_adopted

    def adopted_since(self, changes: int) -> list[str]:
        """The attributes, as code writes them, that other ranks have changed here after so many such changes."""
        return [name for name, last in self._last_change.items() if last > changes]


def _counts(name: str, value: Any) -> bool:
    """Whether an attribute is data: a step leaves parameters and submodules in their places."""
    return (name == "training" or is_compared(name)) and not isinstance(value, nn.Module | nn.Parameter | Callable)


def _holder(module: nn.Module, name: str) -> dict[str, Any]:
    """Where a module keeps an attribute."""
    return module._buffers if name in module._buffers else vars(module)


def _is_same(one: Any, other: Any) -> bool:
    """Whether setting one value in the place of the other changes nothing."""
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and bool(one == other))


def _too_late(module: str, name: str) -> CutError:
    return CutError(
        f"the step changes `{written(module, name)}` behind the layers of its stage, which has run other "
        "micro-batches by then: they would see an old value.",
        hint="Change it before the layers are called, in the module's forward, or in on_train_batch_end; or use "
        "micro_batches=1.",
    )
