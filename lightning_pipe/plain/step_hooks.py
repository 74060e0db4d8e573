"""Hooks that a step registers on modules: removed behind a run that ends early, and kept alike on all ranks.

A step may look into layers, and models of Hugging Face register hooks when attentions are first asked for::

    def validation_step(self, batch, batch_idx):
        handle = self.model[0].register_forward_hook(keep)
        out = self.model(batch)     # all ranks but the last end their run of the step in here,
        handle.remove()             # and never come to this

What a layer registers in its own forward pass stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

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


Registered = tuple[RemovableHandle, Callable[[], RemovableHandle]]
"""A hook that a step has registered: removes it, registers it anew."""


class HooksOfBatch:
    """The hooks that the runs of one batch's step have registered on this rank."""

    def __init__(self) -> None:
        self._complete: list[list[Registered]] = []
        self._removed: list[Registered] = []

    def end_run(self, hooks: list[Registered], *, complete: bool) -> None:
        """A run is over; what it has registered is removed if it does not count."""
        if complete:
            self._complete.append(hooks)
            return
        self._removed = hooks
        for handle, _ in hooks:
            handle.remove()

    def left(self) -> tuple[int, ...]:
        """The hooks that are still there, by their places among all that the run has registered."""
        found = (
            tuple(place for place, (handle, _) in enumerate(hooks) if handle.id in (handle.hooks_dict_ref() or ()))
            for hooks in self._complete
        )
        return next(filter(None, found), ())

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
        registers = [self._removed[place][1] for place in left]
        self._complete.append([(register(), register) for register in registers])  # once, whichever rank tells again


class StepHooks:
    """Notes the hooks that steps register.

    Args:
        module: the user's module.
        computing: whether a layer or an outside module runs now: what that registers is its own.
    """

    def __init__(self, module: nn.Module, computing: Callable[[], bool]) -> None:
        self._modules = {id(part) for part in module.modules()}
        self._computing = computing
        self._noted: list[Registered] | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Around runs of steps: see what is registered on modules."""
        with ExitStack() as changed:
            for kind in _KINDS:
                method = self._noting(getattr(nn.Module, kind))
                changed.enter_context(replaced(nn.Module, kind, method, gated=False))
            yield

    def _noting(self, register: Callable[..., RemovableHandle]) -> Callable[..., RemovableHandle]:
        def noting(module: nn.Module, *args: Any, **kwargs: Any) -> RemovableHandle:
            handle = register(module, *args, **kwargs)
            if self._noted is not None and id(module) in self._modules and not self._computing():
                self._noted.append((handle, partial(register, module, *args, **kwargs)))
            return handle

        return noting

    @contextmanager
    def noting(self, batch: HooksOfBatch, complete: Callable[[], bool]) -> Iterator[None]:
        """Around a run of the step.

        Args:
            batch: its batch.
            complete: asked behind it whether it counts.
        """
        noted: list[Registered] = []
        self._noted = noted
        try:
            yield
        finally:
            self._noted = None
            if noted:
                batch.end_run(noted, complete=complete())
