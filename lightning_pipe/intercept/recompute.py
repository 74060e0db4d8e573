"""Forward passes that keep nothing but their input, and run again before their backward pass.

The second run is the user's own step once more, from the same inputs. Random streams derive from the micro-batch and
the layer, so masks are the same. It finds what the first run has found: the attributes of the LightningModule, those
that have been set in layers since, hooks, and the statistics of batch norms. Of all else nobody keeps the former value:
a layer must not change it in place.
Source: GPipe, arXiv:1811.06965v5, section 2.3.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.intercept.kept_state import Key, now, put_all
from lightning_pipe.intercept.tensor_state import same_values, version_of
from lightning_pipe.torch_internals import NormBase


class _Local(threading.local):
    """Of the code that a thread runs."""

    recomputing = False
    held: list[list[Tensor]] | None = None


_local = _Local()


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
        self._keys = [(part, name) for part in parts.values() for name in part._buffers]

    @contextmanager
    def noted(self, formers: dict[Key, Any], *, thorough: bool) -> Iterator[None]:
        """Around the first run.

        Args:
            formers: get the former values of statistics; the second run is to find them.
            thorough: whether the values of all other buffers are compared.

        Raises:
            CutError: another buffer has changed in place.
        """
        before = self._now()
        formers |= {key: buffer.clone() for key, buffer in before.items() if isinstance(key[0], NormBase)}
        with _unchanged({key: buffer for key, buffer in before.items() if key not in formers}, thorough=thorough):
            yield

    @contextmanager
    def restored(self, *, copies: bool = False) -> Iterator[None]:
        """Around a second run: the tensors that are buffers stay where they are, and as they are.

        Args:
            copies: whether copies stand in their place meanwhile, which it may change.

        Raises:
            CutError: one of them has changed in place.
        """
        before = self._now()
        with _unchanged(before):
            # Others in their place, not other values in them: graphs of other micro-batches may refer to the buffers.
            put_all({key: buffer.clone() for key, buffer in before.items()} if copies else {})
            try:
                yield
            finally:
                put_all(before)

    def _now(self) -> dict[Key, Tensor]:
        return {key: buffer for key in self._keys if isinstance(buffer := now(*key), Tensor)}


@contextmanager
def _unchanged(buffers: Mapping[Key, Tensor], *, thorough: bool = False) -> Iterator[None]:
    """Around a run: tensors that are buffers stay as they are, whatever stands in their place."""
    # Versions do not tell what changes behind autograd's back, as in `torch.nn.functional.batch_norm` (torch 2.13).
    before = [
        (key, buffer, version_of(buffer), buffer.clone() if thorough else None)
        for key, buffer in buffers.items()
        if not isinstance(buffer, AbsentTensor)
    ]
    yield
    for (module, name), buffer, version, value in before:
        if version_of(buffer) != version or not (value is None or same_values(buffer, value)):
            raise found_changed(f"buffer '{name}' of a {type(module).__name__}")
