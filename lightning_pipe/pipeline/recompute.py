"""Forward passes that keep nothing but their input, and run again before their backward pass.

The second run is the user's own step once more, from the same inputs. Random streams derive from the micro-batch and
the layer, so masks are the same; buffers that the first run changed, running statistics for instance, are put back.
Source: GPipe, arXiv:1811.06965v5, section 2.3.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError

_local = threading.local()


def is_recomputing() -> bool:
    """Whether the code that asks runs for the second time, only to give a backward pass what it needs.

    Layers with side effects of their own (counters, statistics) can leave them out then.

    Example:
        >>> is_recomputing()
        False
    """
    return getattr(_local, "recomputing", False)


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
    """Build graphs that know which tensors need gradients and hold none of them."""

    def unpack(packed: Any) -> NoReturn:
        raise CutError("internal error: a backward pass reached a forward pass that kept nothing.")

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, unpack):
        yield


class BufferGuard:
    """Puts buffers back that a second run changes.

    Which ones do is learnt from the first second run, during which all are copied; later only these are.

    Args:
        modules: the modules whose buffers are guarded.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = {id(part): part for module in modules for part in module.modules()}
        self._places = [(part, name) for part in parts.values() for name in part._buffers]
        self._changing: set[int] | None = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run the code inside and put the buffers back."""
        before = [self._get(place) for place in self._places]
        copies = {
            index: buffer.clone()
            for index, buffer in enumerate(before)
            if buffer is not None and (self._changing is None or index in self._changing)
        }
        versions = [None if buffer is None else buffer._version for buffer in before]
        yield
        changed: set[int] = set()
        for index, (place, buffer, version) in enumerate(zip(self._places, before, versions, strict=True)):
            if self._get(place) is buffer and (buffer is None or buffer._version == version):
                continue
            changed.add(index)
            intact = buffer is None or buffer._version == version
            self._put_back(place, buffer, None if intact else copies.get(index), intact=intact)
        self._changing = changed | (self._changing or set())

    @staticmethod
    def _get(place: tuple[nn.Module, str]) -> Tensor | None:
        module, name = place
        return module._buffers[name]

    @staticmethod
    def _put_back(place: tuple[nn.Module, str], buffer: Tensor | None, copy: Tensor | None, *, intact: bool) -> None:
        module, name = place
        module._buffers[name] = buffer
        if intact or buffer is None:
            return
        if copy is None:
            raise CutError(
                f"buffer '{name}' of a {type(module).__name__} changed while a forward pass ran again, for the first "
                "time in this run: its value is lost.",
                hint="Change it in every forward pass or in none, or not while lightning_pipe.is_recomputing().",
            )
        with torch.no_grad():
            buffer.copy_(copy)
