"""The attributes of the LightningModule that a run of the step reads.

A rank that evaluates a batch ahead of the others has not yet adopted what the batches before it have changed on the
last stage. Its run is right all the same unless it reads what they have changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_pipe.intercept.contents import Change
from lightning_pipe.intercept.lookups import reads_told
from lightning_pipe.intercept.snapshot import Snapshot, is_compared
from lightning_pipe.intercept.state_reads import Watched
from lightning_pipe.patches import replaced

_BUFFERS = "_buffers"
_LOGGED = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
"""What the Trainer says of the values that steps have logged: every batch changes it."""
_TRAINER, _OF_TRAINER = "<trainer>", -1
"""In the places of a module's name and of its ``id``."""
_MISSING = object()

Names = dict[str, set[str]]
"""Names of attributes, by the name of their module."""


class ReadState:
    """What a run has read, as it was at the time of the run.

    Args:
        modules: the modules by name.
        names: the attributes that were read.
    """

    def __init__(self, modules: Mapping[str, nn.Module], names: Names) -> None:
        self._names = names
        self._logged = [f"self.trainer.{name}" for name in sorted(names.get(_TRAINER, ()))]
        # a buffer is looked up in the dictionary of all of them
        only = {
            name: {*names[name], _BUFFERS} if names[name] & set(module._buffers) else names[name]
            for name, module in modules.items()
            if name in names
        }
        self._snapshot = Snapshot(modules, only)

    def changed(self) -> list[str]:
        """The attributes among them that are different now, as code writes them."""
        found = [root_of(change) for change in self._snapshot.changes()]
        read = [f"self.{module}.{name}".replace("..", ".") for module, name in found if name in self._names[module]]
        return read + self._logged


class AttributeReads:
    """Notes which attributes are read that hold data: not methods, parameters, modules and Lightning's own.

    Args:
        modules: the modules whose attributes count, by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._by_id = {id(module): (name, module) for name, module in modules.items()}
        self._noted: set[tuple[int, str]] | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Around an evaluation."""
        with ExitStack() as changed:
            for kind in {type(module) for module in self._modules.values()}:
                changed.enter_context(reads_told(kind, self._note))
            for name in _LOGGED:
                changed.enter_context(replaced(pl.Trainer, name, self._noting_logged(name), gated=False))
            yield

    def _noting_logged(self, name: str) -> property:
        original: property = vars(pl.Trainer)[name]

        def read(trainer: pl.Trainer) -> Any:
            if self._noted is not None:
                self._noted.add((_OF_TRAINER, name))
            return original.__get__(trainer)

        return property(read)

    def _note(self, module: nn.Module, name: str) -> None:
        if self._noted is not None:
            self._noted.add((id(module), name))

    @contextmanager
    def noting(self) -> Iterator[Names]:
        """Around a run of the step: the names are complete when the context has ended."""
        names: Names = {}
        noted = self._noted = set()
        try:
            yield names
        finally:
            self._noted = None
            for ident, name in noted:
                if ident == _OF_TRAINER:
                    names.setdefault(_TRAINER, set()).add(name)
                elif ident in self._by_id and self._holds_data(self._by_id[ident][1], name):
                    names.setdefault(self._by_id[ident][0], set()).add(name)

    def state(self, names: Names) -> ReadState | None:
        """What was read, as it is now; ``None`` if nothing was."""
        return ReadState(self._modules, names) if names else None

    @staticmethod
    def _holds_data(module: nn.Module, name: str) -> bool:
        """Whether an attribute, which may not exist, is neither code nor part of the module's structure."""
        if name.startswith("__") or name in module._parameters or name in module._modules:
            return False
        if not is_compared(name) or hasattr(pl.LightningModule, name):
            return False
        # a property or method reads attributes itself; what is watched is an attribute
        found = inspect.getattr_static(type(module), name, _MISSING)
        return isinstance(found, Watched) or not hasattr(type(found), "__get__")


def root_of(change: Change) -> tuple[str, str]:
    """The module and the attribute of it that a change concerns."""
    module, (_, name), *inner = change.path
    return module, str(inner[0][1]) if name == _BUFFERS and inner else str(name)
