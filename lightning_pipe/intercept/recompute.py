"""Forward passes that keep nothing but their input, and run again before their backward pass.

The second run is the user's own step once more, from the same inputs. Random streams derive from the micro-batch and
the layer, so masks are the same. It finds what the first run has found: the attributes of the LightningModule, those
that have been set in layers since, and the statistics of batch norms. Of all else nobody keeps the former value: a
layer must not change it in place.
Source: GPipe, arXiv:1811.06965v5, section 2.3.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.intercept.tensor_state import same_values, version_of
from lightning_pipe.torch_internals import NormBase


class _Local(threading.local):
    """Of the code that a thread runs."""

    recomputing = False
    held: list[list[Tensor]] | None = None


_local = _Local()
Buffers = Mapping[int, Tensor]
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


def found_changed(what: str) -> CutError:
    """A layer changes what a second run would find changed.

    Args:
        what: the attribute or buffer as a message names it.
    """
    return CutError(
        f"{what} is changed in place in a forward pass that runs twice, for recompute or to look at the losses of the "
        "first batches: the second run would not find what the first one has found.",
        hint="Set another value in its place: `self.items = [*self.items, x]`, `self.steps = self.steps + 1`. "
        "recompute='never' lets a layer change its own in place.",
    )


def release_saved() -> None:
    """A layer has ended, and a backward pass inside it as well: let go of what graphs hold under `nothing_saved`."""
    if held := _local.held:
        for tensors in held:
            tensors.clear()
        held.clear()


class BufferGuard:
    """Lets a second run find the statistics of norms as the first one did, and leaves buffers as they are.

    Args:
        modules: the modules whose buffers are guarded.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = {id(part): part for module in modules for part in module.modules()}
        self._places = [(part, name) for part in parts.values() for name in part._buffers]
        self._statistics = {i for i, (part, _) in enumerate(self._places) if isinstance(part, NormBase)}

    @contextmanager
    def noted(self, *, thorough: bool) -> Iterator[Buffers]:
        """Around the first run. What it yields has the former values of statistics.

        Args:
            thorough: whether the values of all other buffers are compared.

        Raises:
            CutError: another buffer has changed in place.
        """
        former = self._copies(self._statistics)
        # Versions do not tell what changes behind autograd's back, as in `torch.nn.functional.batch_norm` (torch 2.13).
        compared = self._copies(range(len(self._places))) if thorough else {}
        with self._unchanged(self._statistics, compared):
            yield former

    @contextmanager
    def restored(self, former: Buffers | None = None) -> Iterator[None]:
        """Around the second run.

        Args:
            former: the values of statistics before the first run; ``None``: all buffers have those of now.
        """
        before = self._now()
        with self._unchanged():
            # Others in their place, not other values in them: graphs of other micro-batches may refer to the buffers.
            for index, value in (self._copies(range(len(before))) if former is None else former).items():
                module, name = self._places[index]
                module._buffers[name] = value
            try:
                yield
            finally:
                for (module, name), buffer in zip(self._places, before, strict=True):
                    module._buffers[name] = buffer

    @contextmanager
    def _unchanged(self, free: Container[int] = (), values: Buffers = MappingProxyType({})) -> Iterator[None]:
        """Around a run: the tensors that are buffers stay as they are, whatever stands in their place.

        Args:
            free: those that may change.
            values: copies of some of them, to be compared.

        Raises:
            CutError: one of the others has changed.
        """
        before = [
            (index, buffer, version_of(buffer))
            for index, buffer in enumerate(self._now())
            if not (buffer is None or index in free or isinstance(buffer, AbsentTensor))
        ]
        yield
        for index, buffer, version in before:
            if version_of(buffer) != version or (index in values and not same_values(buffer, values[index])):
                module, name = self._places[index]
                raise found_changed(f"buffer '{name}' of a {type(module).__name__}")

    def _now(self) -> list[Tensor | None]:
        return [module._buffers[name] for module, name in self._places]

    def _copies(self, indices: Iterable[int]) -> dict[int, Tensor]:
        found = {index: self._places[index] for index in indices}
        return {
            i: buffer.clone() for i, (module, name) in found.items() if (buffer := module._buffers[name]) is not None
        }
