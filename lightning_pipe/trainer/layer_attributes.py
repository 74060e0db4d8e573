"""Attributes of layers and outside modules that the step's own code sets: made equal on all ranks.

What a layer does to itself in its forward pass, and what its hooks do to it, such as those of weight norm, stays where
it is called. The step may set its attributes as well::

    def validation_step(self, batch, batch_idx):
        self.model.train()              # every rank runs this
        samples = self.model(batch)     # all ranks but the last end their run of the step in here,
        self.model.eval()               # and never come to this
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_pipe.intercept.snapshot import Change, is_compared
from lightning_pipe.patches import replaced

_CALL = nn.Module.__call__.__code__
_MISSING = object()
_PLAIN = (int, float, str, bytes, type(None))

Former = dict[tuple[str, str], Any]
"""What attributes were before they were set, by the names of the module and of the attribute."""


class LayerAttributes:
    """Notes what steps set in layers and in modules outside the sequence that hold parameters.

    Args:
        modules: all parts of them, by name.
        computing: whether a layer or an outside module runs now: what that sets is its own.
        within: told of what one is about to set then, with the module, the name and the value.
        others: the other modules of the user's module.

    Attributes:
        changes_adopted: how often another rank has changed an attribute on this one so far.
        latest: those that the last run of the step has set here.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        computing: Callable[[], bool],
        within: Callable[[nn.Module, str, Any], None],
        others: Iterable[nn.Module] = (),
    ) -> None:
        self.modules = {name: module for name, module in modules.items() if not isinstance(module, Metric)}
        self._names = {id(module): name for name, module in self.modules.items()}
        self._all = {*self._names, *(id(module) for module in others if not isinstance(module, Metric))}
        self._computing, self._within = computing, within
        self._noted: Former | None = None
        self._complete: Former = {}
        self.changes_adopted = 0
        self._last_change: dict[str, int] = {}  # which of them was the last one of each attribute, as code writes it
        self.latest: set[str] = set()

    def installed(self) -> AbstractContextManager[None]:
        """Around a run of the Trainer: see what is set in modules."""
        setting = nn.Module.__setattr__

        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            if self._noted is not None and id(module) in self._all and _counts(name, value):
                if self._computing():
                    self._within(module, name, value)
                elif id(module) in self._names:
                    key = (self._names[id(module)], name)
                    if key not in self._noted and not self._in_a_call():
                        self._noted[key] = _holder(module, name).get(name, _MISSING)
            setting(module, name, value)

        return replaced(nn.Module, "__setattr__", set_attribute, gated=False)

    def _in_a_call(self) -> bool:
        """Whether one of the modules is being called: its hooks run around its forward pass."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code is _CALL and id(frame.f_locals["self"]) in self._names:
                return True
            frame = frame.f_back
        return False

    @contextmanager
    def noting(self, complete: Callable[[], bool], *, undo: bool) -> Iterator[None]:
        """Around a run of the step.

        Args:
            complete: asked behind it whether it counts; what it has set is for the other ranks then.
            undo: whether what another run has set is to be put back.
        """
        noted: Former = {}
        self._noted = noted
        try:
            yield
        finally:
            self._noted = None
            self.latest = {_written(*key) for key in noted}
            if complete():
                self._complete = {**noted, **self._complete}
            elif undo:
                self._put_back(noted)

    def _put_back(self, former: Former) -> None:
        for (module, name), value in former.items():
            holder = _holder(self.modules[module], name)
            if value is _MISSING:
                holder.pop(name, None)
            else:
                holder[name] = value

    def changes(self) -> list[Change]:
        """What complete runs have set since this was asked: numbers and the like always, as other ranks may differ."""
        complete, self._complete = self._complete, {}
        found = []
        for (module, name), former in complete.items():
            value = _holder(self.modules[module], name).get(name, former)
            if isinstance(value, _PLAIN) or value is not former:
                found.append(Change("set", (module, ("attribute", name)), value))
        return found

    def adopt(self, changes: Sequence[Change]) -> list[Change]:
        """Set what another rank's complete runs have set. Returns the other changes among those."""
        others = []
        for change in changes:
            module, (_, name), *inner = change.path
            if inner or module not in self.modules:
                others.append(change)
                continue
            held = _holder(self.modules[module], name)
            now = held.get(name, _MISSING)
            if not (isinstance(now, _PLAIN) and type(now) is type(change.value) and now == change.value):
                held[name] = change.value
                self.changes_adopted += 1
                self._last_change[_written(module, name)] = self.changes_adopted
        return others

    def adopted_since(self, changes: int) -> list[str]:
        """The attributes, as code writes them, that other ranks have changed here after so many such changes."""
        return [name for name, last in self._last_change.items() if last > changes]


def _counts(name: str, value: Any) -> bool:
    """Whether an attribute is data: a step leaves parameters and submodules in their places."""
    return (name == "training" or is_compared(name)) and not isinstance(value, nn.Module | nn.Parameter | Callable)


def _holder(module: nn.Module, name: str) -> dict[str, Any]:
    """Where a module keeps an attribute."""
    return module._buffers if name in module._buffers else vars(module)


def _written(module: str, name: str) -> str:
    return f"self.{module}.{name}"
