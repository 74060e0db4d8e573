"""Forward passes that keep nothing but their input, and run again before their backward pass.

The second run is the user's own step once more, from the same inputs. Random streams derive from the micro-batch and
the layer, so masks are the same; buffers that the first run changed, running statistics for instance, have the values
that it found, and afterwards those of now.
Source: GPipe, arXiv:1811.06965v5, section 2.3.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.intercept.tensor_state import TensorState, has_changed, same_values, state_of
from lightning_pipe.torch_internals import NormBase


class _Local(threading.local):
    """Of the code that a thread runs."""

    recomputing = False
    held: list[list[Tensor]] | None = None


_local = _Local()
Buffers = dict[int, Tensor]
"""Values of some buffers, by their number in a `BufferGuard`."""


def is_recomputing() -> bool:
    """Whether the code that asks runs for the second time, only to give a backward pass what it needs.

    Layers with side effects of their own (counters, statistics) can leave them out then.

    Example:
        >>> is_recomputing()
        False
    """
    return _local.recomputing


@contextmanager
def recomputing() -> Iterator[None]:
    """Mark the code inside as a second run."""
    _local.recomputing = True
    try:
        yield
    finally:
        _local.recomputing = False


@contextmanager
def nothing_saved() -> Iterator[None]:
    """Build graphs that know which tensors need gradients and hold none of them after `release_saved`."""

    def pack(tensor: Tensor) -> list[Tensor]:
        held = [tensor]  # the graph keeps the list, which can be emptied while the graph lives
        graphs.append(held)
        return held

    def unpack(held: list[Tensor]) -> Tensor:
        if not held:
            raise CutError(
                "a backward pass inside the step (torch.autograd.grad, for instance) goes back to layers that have "
                "ended; with recompute nothing of them is kept.",
                hint="Keep such a backward pass inside one layer, or use recompute='never'.",
            )
        return held[0]

    graphs = _local.held = []
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        release_saved()
        _local.held = None


def release_saved() -> None:
    """A layer has ended, and a backward pass inside it as well: let go of what graphs hold under `nothing_saved`."""
    if held := _local.held:
        for tensors in held:
            tensors.clear()
        held.clear()


class BufferGuard:
    """Lets a second run find buffers as the first one did, and leaves them as they are.

    Which ones change is known from the first run of each stage, around which all are copied; later only these are.

    Args:
        modules: the modules whose buffers are guarded.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = {id(part): part for module in modules for part in module.modules()}
        self._places = [(part, name) for part in parts.values() for name in part._buffers]
        self._changing: dict[int, set[int]] = {}

    @contextmanager
    def noted(self, stage: int) -> Iterator[Buffers]:
        """Around the first run. What it yields has, afterwards, the former values of the buffers that it changed.

        Args:
            stage: whose run it is.
        """
        known = self._changing.get(stage)
        # Before the first run of a stage nobody knows which buffers it changes.
        former = self._copies(range(len(self._places)) if known is None else known)
        before = self._now()
        states = [_state(buffer) for buffer in before]
        yield former
        changing = set(known) if known is not None else {i for i in former if self._surely_changes(i)}
        for index, (buffer, now) in enumerate(zip(before, self._now(), strict=True)):
            if buffer is None or index in changing:
                continue
            # Versions alone do not tell: batch norm changes its statistics behind autograd's back (torch 2.13).
            if has_changed(buffer, states[index]) or (index in former and not _same(buffer, former[index])):
                if index not in former:
                    raise self._lost(index)
                changing.add(index)
            elif now is not buffer:
                former.setdefault(index, buffer)
                changing.add(index)
        for index in former.keys() - changing:
            del former[index]
        self._changing[stage] = changing

    @contextmanager
    def restored(self, former: Buffers | None = None) -> Iterator[None]:
        """Around the second run.

        Args:
            former: the values of changing buffers before the first run; ``None``: all buffers have those of now.
        """
        before = self._now()
        states = [_state(buffer) for buffer in before]
        # Others in their place, not other values in them: graphs of other micro-batches may refer to the buffers.
        for index, value in (self._copies(range(len(before))) if former is None else former).items():
            module, name = self._places[index]
            module._buffers[name] = value
        try:
            yield
        finally:
            for (module, name), buffer in zip(self._places, before, strict=True):
                module._buffers[name] = buffer
        # The run had other tensors in the place of all that are known to change: this one it reached all the same.
        for index, buffer in enumerate(before):
            if buffer is not None and has_changed(buffer, states[index]):
                raise self._lost(index)

    def _now(self) -> list[Tensor | None]:
        return [module._buffers[name] for module, name in self._places]

    def _copies(self, indices: Iterable[int]) -> Buffers:
        found = {index: self._places[index] for index in indices}
        return {
            i: buffer.clone() for i, (module, name) in found.items() if (buffer := module._buffers[name]) is not None
        }

    def _surely_changes(self, index: int) -> bool:
        """Statistics change in training, which may begin later than the first run, and versions do not tell."""
        return isinstance(self._places[index][0], NormBase)

    def _lost(self, index: int) -> CutError:
        module, name = self._places[index]
        return CutError(
            f"buffer '{name}' of a {type(module).__name__} is changed in place in some forward passes and not in "
            "others; one of them runs again, and the buffer's former value is lost.",
            hint="Change it in every forward pass or in none, and not by lightning_pipe.is_recomputing().",
        )


def _state(buffer: Tensor | None) -> TensorState:
    return None if buffer is None or isinstance(buffer, AbsentTensor) else state_of(buffer)


def _same(buffer: Tensor, copy: Tensor) -> bool:
    return isinstance(buffer, AbsentTensor) or same_values(buffer, copy)
