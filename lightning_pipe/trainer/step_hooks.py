"""Hooks that a step registers on modules: removed behind a run that ends early, and kept alike on all ranks.

A step may look into layers, and models of Hugging Face register hooks when attentions are first asked for::

    def validation_step(self, batch, batch_idx):
        handle = self.model[0].register_forward_hook(keep)
        out = self.model(batch)     # all ranks but the last end their run of the step in here,
        handle.remove()             # and never come to this

What a layer registers in its own forward pass stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_pipe.errors import CutError
from lightning_pipe.patches import replaced

_KINDS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_backward_hook",
)


class _Entry(NamedTuple):
    """What a handle stands for in one table of a module, and whether it came before older hooks."""

    table: MutableMapping[int, Any]
    key: int
    value: Any
    first: bool

    def put_back(self) -> None:
        self.table[self.key] = self.value
        if self.first:
            self.table.move_to_end(self.key, last=False)  # type: ignore[attr-defined]


class HooksOfBatch:
    """The hooks that the runs of one batch's step have registered on this rank."""

    def __init__(self) -> None:
        self._complete: list[list[RemovableHandle]] = []
        self._removed: list[list[_Entry]] = []

    def end_run(self, handles: list[RemovableHandle], *, complete: bool) -> None:
        """A run is over; what it has registered is removed if it does not count."""
        if complete:
            self._complete.append(handles)
        else:
            self._removed = [_removed(handle) for handle in handles]

    def left(self) -> tuple[int, ...]:
        """The hooks that are still there, by their places among all that the run has registered."""
        for handles in self._complete:
            if left := tuple(place for place, handle in enumerate(handles) if _entries(handle)):
                return left
        return ()

    def put_back(self, left: Sequence[int]) -> None:
        """Have the hooks on this rank that the complete run has left on another one.

        Args:
            left: from `left` there.

        Raises:
            CutError: this rank's runs ended before the step had registered them.
        """
        if not left or self._complete:
            return
        if left[-1] >= len(self._removed):
            raise CutError(
                "the step registers a hook on a module behind a cut, for later batches: stages before it never come "
                "there.",
                hint="Register hooks that stay in setup or configure_model.",
            )
        for place in left:
            for entry in self._removed[place]:
                entry.put_back()


class StepHooks:
    """Notes the hooks that steps register.

    Args:
        module: the LightningModule.
        computing: whether a layer or an outside module runs now: what that registers is its own.
    """

    def __init__(self, module: nn.Module, computing: Callable[[], bool]) -> None:
        self._modules = {id(part) for part in module.modules()}
        self._computing = computing
        self._noted: list[RemovableHandle] | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Around a run of the Trainer: see what is registered on modules."""
        with ExitStack() as changed:
            for kind in _KINDS:
                method = self._noting(getattr(nn.Module, kind))
                changed.enter_context(replaced(nn.Module, kind, method, gated=False))
            yield

    def _noting(self, register: Callable[..., RemovableHandle]) -> Callable[..., RemovableHandle]:
        def noting(module: nn.Module, *args: Any, **kwargs: Any) -> RemovableHandle:
            handle = register(module, *args, **kwargs)
            if self._noted is not None and id(module) in self._modules and not self._computing():
                self._noted.append(handle)
            return handle

        return noting

    @contextmanager
    def noting(self, batch: HooksOfBatch, complete: Callable[[], bool]) -> Iterator[None]:
        """Around a run of the step.

        Args:
            batch: its batch.
            complete: asked behind it whether it counts.
        """
        noted: list[RemovableHandle] = []
        self._noted = noted
        try:
            yield
        finally:
            self._noted = None
            if noted:
                batch.end_run(noted, complete=complete())


def _entries(handle: RemovableHandle) -> list[_Entry]:
    tables = [reference() for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref)]
    return [
        _Entry(table, handle.id, table[handle.id], len(table) > 1 and next(iter(table)) == handle.id)
        for table in tables
        if table is not None and handle.id in table
    ]


def _removed(handle: RemovableHandle) -> list[_Entry]:
    entries = _entries(handle)
    handle.remove()
    return entries
