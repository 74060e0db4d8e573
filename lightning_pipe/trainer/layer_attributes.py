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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.intercept.around import alike
from lightning_pipe.intercept.contents import Change
from lightning_pipe.intercept.kept_state import filled, holder_of, shown
from lightning_pipe.intercept.layer_calls import by_own_value
from lightning_pipe.intercept.lookups import reads_told
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.shared_state import written
from lightning_pipe.intercept.snapshot import is_compared
from lightning_pipe.patches import replaced
from lightning_pipe.trainer.attribute_records import (
    PLAIN,
    UNKNOWN,
    Complete,
    Key,
    Known,
    Noted,
    Run,
    Runs,
    is_same,
    of_others,
    too_late,
    too_late_elsewhere,
)

_CALL = nn.Module.__call__.__code__
_MISSING, _IN_PLACE = object(), object()
_COMPARED = (*PLAIN, Tensor, np.ndarray)
"""Types of values that are alike if they have the same content: an object of a library's may say otherwise."""
_AS_IT_IS: AbstractContextManager[None] = nullcontext()


class LayerAttributes:
    """Notes what steps set in layers and in modules outside the sequence that hold parameters.

    Args:
        modules: all parts of them, by name.
        runs: knows the run of the step that is under way.
        others: the other modules of the user's module, by name: of these the mode counts (``training``).
        alternating: whether the runs of several training batches alternate.

    Attributes:
        modules: all of them, by name.
        latest: those that the last run of the step has set here by itself, with the mode of each module which it has
            called.
        has_set: whether it has set any.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        runs: Runs,
        others: Mapping[str, nn.Module] | None = None,
        *,
        alternating: bool = False,
    ) -> None:
        both = {**modules, **(others or {})}
        self.modules = {name: module for name, module in both.items() if not isinstance(module, Metric)}
        self._all = {id(module): name for name, module in self.modules.items()}
        self._names = {key: name for key, name in self._all.items() if name in modules}
        self._runs = runs
        self._run: Run | None = None
        self._followed, self._compares, self._alternating = False, False, alternating
        self._begun: set[str] = set()
        self._complete: dict[Key, Complete] = {}
        self._known: dict[Key, Known] = {}
        self.changes_adopted = 0
        self.latest: dict[str, bool | None] = {}
        self.has_set = False
        self._agreed_modes: dict[str, bool] = {}

    def installed(self) -> AbstractContextManager[None]:
        """Around a run of the Trainer: see what is set in modules."""
        setting = nn.Module.__setattr__

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            if name == "_current_fx_name":  # a string that Lightning sets around every hook
                vars(module)[name] = value
                return
            run = self._run
            if run is not None and id(module) in self._all and _counts(name, value):
                if self._runs.in_module:
                    self._runs.setting(module, name, value)
                elif id(module) in self._names or name == "training":
                    self._note(module, name, value, run)
            setting(module, name, value)

        return replaced(nn.Module, "__setattr__", set_attribute, gated=False)

    def _all_seen(self) -> AbstractContextManager[None]:
        """Around the first runs: see what they read, as it is not known yet what they set."""

        def look(module: nn.Module, name: str) -> None:
            if not name.startswith("_") and id(module) in self._names and not self._runs.in_module:
                self.by_read(module, name)

        return reads_told(nn.Module, look)

    def by_read(self, part: nn.Module, name: str) -> None:
        """The step's own code reads an attribute."""
        if self._run is not None and id(part) in self._names:
            key = self._names[id(part)], name
            if key not in self._run.noted:
                self._run.read.add(key)

    def _note(self, module: nn.Module, name: str, value: Any, run: Run) -> None:
        """The step is about to set an attribute."""
        key = (self._all[id(module)], name)
        former = holder_of(module, name).get(name, _MISSING)
        noted = run.noted.get(key)
        changed = (run.followed or run.pipes) and not is_same(former, value)
        # what each run sets before the layers, too, is alike for all micro-batches unless calls change it
        if changed and run.followed and self._runs.is_behind(module, None if noted is None else name):
            raise too_late(*key)
        if noted is None:
            if self._in_a_call():
                return
            if changed and run.pipes and key in run.read:
                raise by_own_value(written(*key))
            noted = run.noted[key] = Noted(former)
            if id(module) in self._names:
                self._runs.note_set(module, name)
        noted.behind = self._runs.is_behind(module)

    def _in_a_call(self) -> bool:
        """Whether one of the modules is being called: its hooks run around its forward pass."""
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            if frame.f_code is _CALL and id(frame.f_locals["self"]) in self._names:
                return True
            frame = frame.f_back
        return False

    def is_first(self, step: str) -> bool:
        """Whether a step, of which a batch is about to begin, has had none before."""
        if step in self._begun:
            return False
        self._begun.add(step)
        return True

    @contextmanager
    def noting(
        self,
        complete: Callable[[], bool],
        *,
        undo: bool,
        followed: bool = False,
        pipes: bool = False,
        first: bool = False,
    ) -> Iterator[None]:
        """Around a run of the step.

        Args:
            complete: asked behind it whether it counts; what it has set is for the other ranks then.
            undo: whether what another run has set is to be put back.
            followed: whether earlier stages run other micro-batches before they learn what it has set.
            pipes: whether other micro-batches of its batch take another way, past other ranks.
            first: whether the step has not been seen before.
        """
        run, self._followed, self._compares = Run(followed, pipes), followed, not (undo or self._alternating)
        self._run = run
        try:
            with self._all_seen() if first and self._runs.watches else _AS_IT_IS:
                yield
        finally:
            self._run = None
            self._leave_to_others(run.noted)
            self.has_set = bool(run.noted)
            # what it has read before is not its own: it has set that by what was there
            self.latest = {written(*key): self._mode(*key) for key in run.noted if key not in run.read}
            if complete():
                self._note_complete(run)
            elif undo:
                self._put_back(run.noted)

    def _leave_to_others(self, noted: dict[Key, Noted]) -> None:
        """The buffers of other ranks' layers that the step sets by their own values have these there, and not here."""
        for key, each in [*noted.items()]:
            held = holder_of(self.modules[key[0]], key[1])
            if not each.behind and _is_elsewhere(each, held.get(key[1])):
                held[key[1]] = noted.pop(key).former

    def _note_complete(self, run: Run) -> None:
        for key in run.called:
            record = self._complete.setdefault(key, Complete())
            record.value, record.is_kept = vars(self.modules[key[0]]).get(key[1]), True
        for key, noted in run.noted.items():
            record = self._complete.setdefault(key, Complete())
            if not record.is_set:
                record.former, record.is_set = noted.former, True
            value = holder_of(self.modules[key[0]], key[1]).get(key[1], noted.former)
            if _is_elsewhere(noted, value):
                raise too_late_elsewhere(*key)
            # before the others are told, all copies of a layer get the buffers that one of them has
            overwritten = isinstance(value, Tensor) and value is not noted.former and not self._runs.one_pipe
            record.value = value.detach().clone() if overwritten else value
            record.behind = noted.behind

    def _put_back(self, noted: Mapping[Key, Noted]) -> None:
        """Later runs go on with what has been set in a module that runs here, unless the step sets it once more."""
        for key, each in noted.items():
            module, name = key
            holder, known = holder_of(self.modules[module], name), self._known.setdefault(key, Known())
            if not known.set_behind and self._runs_now(module):
                if known.agreed is UNKNOWN:
                    known.agreed = each.former
            elif self._runs.apart and name != "training":
                continue
            elif each.former is _MISSING:
                holder.pop(name, None)
            else:
                holder[name] = each.former

    def _runs_now(self, module: str) -> bool:
        return self._runs.has_run(self.modules[module], now=True)

    def _mode(self, module: str, name: str) -> bool | None:
        return self.modules[module].training if name == "training" and self._runs_now(module) else None

    def by_call(self, part: nn.Module, name: str) -> None:
        """A call changes an attribute: what the step had set there is the past, and not to be put back either."""
        if id(part) not in self._names:
            return
        key = self._names[id(part)], name
        if self._run is not None:
            self._run.noted.pop(key, None)
            if name not in part._buffers:
                self._run.called[key] = None
        if key in self._complete:
            self._complete[key].is_set = False

    def by_step(self, part: nn.Module, name: str, *, behind: bool = True) -> None:
        """A complete run has changed a list, a dictionary or an object in place.

        Args:
            part: of this part of a module.
            name: the attribute that refers to it.
            behind: whether the stage of the module does not run the code that has changed it.

        Raises:
            CutError: that stage runs other micro-batches before it learns of it.
        """
        if id(part) in self._names:
            key = self._names[id(part)], name
            if behind and self._followed:
                raise too_late(*key)
            self._runs.note_set(part, name)
            record = self._complete.setdefault(key, Complete())
            record.former, record.value = _IN_PLACE, copy.deepcopy(vars(part)[name])
            record.behind, record.is_set = behind or (record.is_set and record.behind), True

    def changes(self) -> list[Change]:
        """What complete runs have set since this was asked, and what calls have changed.

        What was set comes always if it is a number or the like, as other ranks may differ.
        """
        complete, self._complete = self._complete, {}
        found = []
        for (module, name), each in complete.items():
            path = module, ("attribute", name)
            if each.is_set and (isinstance(each.value, PLAIN) or each.value is not each.former):
                # what was changed in place stays the same object, as others may hold it; what was set is another one
                kind: Literal["fill", "set"] = "fill" if each.former is _IN_PLACE else "set"
                found.append(Change(kind, path, each.value, everywhere=each.behind))
            if each.is_kept:
                data = shown(each.value) if self._runs.one_pipe and not isinstance(each.value, Tensor) else None
                found.append(Change("hide" if data is None else "keep", path, data))
        # behind its last stage, a rank with several has what the others have set; no hook is to read what is hidden
        self.adopt(found if self._runs.several else [change for change in found if change.kind == "hide"])
        return found

    def others(self, changes: Sequence[Change]) -> list[Change]:
        """The changes that concern other modules, or what is in their attributes."""
        return [change for change in changes if not self._concerns(change)]

    def _concerns(self, change: Change) -> bool:
        name, (_, attribute), *inner = change.path
        part = self.modules.get(name)
        return part is not None and not inner and (id(part) in self._names or attribute == "training")

    def adopt(self, changes: Sequence[Change]) -> None:
        """Have what another rank's complete runs have set, and what calls have changed.

        Raises:
            CutError: the runs for this rank's stage have set something else there.
        """
        self._agreed_modes.clear()
        for change in filter(self._concerns, changes):
            module, (_, name) = change.path
            if name == "training" and not change.everywhere:
                self._agreed_modes[written(module, name)] = change.value
            if change.kind == "hide":
                self._runs.hide(self.modules[module], name)
            elif change.kind == "keep":
                if self._runs.changed_elsewhere(self.modules[module], name):
                    vars(self.modules[module])[name] = pickle.loads(change.value)
            elif change.everywhere or not (self._runs.one_pipe and self._runs.has_run(self.modules[module])):
                if change.everywhere:
                    self._known.setdefault((module, name), Known()).set_behind = True
                self._set(module, name, change.value, fill=change.kind == "fill")
            else:
                self._agree(module, name, change.value)

    def _agree(self, module: str, name: str, value: Any) -> None:
        """A complete run has set an attribute before the layers, as the runs for this rank's stage have done."""
        known, own = self._known.get((module, name)), holder_of(self.modules[module], name).get(name)
        if known is not None and known.agreed is not UNKNOWN:
            known.agreed = value
        elif self._compares and isinstance(value, _COMPARED) and isinstance(own, _COMPARED) and not alike(own, value):
            raise of_others((module, name), own, value)

    def _set(self, module: str, name: str, value: Any, *, fill: bool) -> None:
        held, known = holder_of(self.modules[module], name), self._known.setdefault((module, name), Known())
        before, known.agreed = known.agreed, UNKNOWN
        self._runs.adopts(self.modules[module], name)
        if before is UNKNOWN:
            before = held.get(name, _MISSING)
        if not is_same(held.get(name, _MISSING), value) and not (fill and filled(held.get(name), value)):
            held[name] = value
        if not is_same(before, value):
            self.changes_adopted += 1
            known.last_change = self.changes_adopted

    def contradicted(self, own: Mapping[str, bool | None]) -> str | None:
        """The mode of a module that has run here in another one than the complete run has just set.

        Args:
            own: what this rank's runs of the same batch have set; see `latest`.
        """
        modes = ((name, mode) for name, mode in own.items() if mode is not None)
        return next((name for name, mode in modes if self._agreed_modes.get(name, mode) != mode), None)

    def adopted_since(self, changes: int) -> list[str]:
        """The attributes, as code writes them, that other ranks have changed here after so many such changes."""
        late = [(known.last_change, key) for key, known in self._known.items() if known.last_change > changes]
        return [written(*key) for _, key in sorted(late)]


def _is_elsewhere(noted: Noted, value: Any) -> bool:
    """Whether a run has made the value of a buffer of that which another rank alone has."""
    return isinstance(noted.former, AbsentTensor) and isinstance(value, Placeholder | AbsentTensor)


def _counts(name: str, value: Any) -> bool:
    """Whether an attribute is data: a step leaves parameters and submodules in their places."""
    return (name == "training" or is_compared(name)) and not isinstance(value, nn.Module | nn.Parameter | Callable)
