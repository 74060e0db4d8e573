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

    Which ones do is learnt from the first second run of each stage, during which all are copied; later only these are.

    Args:
        modules: the modules whose buffers are guarded.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = {id(part): part for module in modules for part in module.modules()}
        self._places = [(part, name) for part in parts.values() for name in part._buffers]
        self._changing: dict[int, set[int]] = {}

    @contextmanager
    def restored(self, stage: int = 0) -> Iterator[None]:
        """Run the code of a stage inside and put the buffers back."""
        before = [module._buffers[name] for module, name in self._places]
        versions = [None if buffer is None else buffer._version for buffer in before]
        # Versions alone do not tell: batch norm changes its statistics behind autograd's back (torch 2.13).
        candidates = self._changing.get(stage, range(len(before)))
        copies = {index: buffer.clone() for index in candidates if (buffer := before[index]) is not None}
        yield
        changed = set(self._changing.get(stage, ()))
        for index, ((module, name), buffer) in enumerate(zip(self._places, before, strict=True)):
            replaced = module._buffers[name] is not buffer
            module._buffers[name] = buffer
            if buffer is None:
                continue
            if index in copies:
                if buffer._version != versions[index] or not _same(buffer, copies[index]):
                    buffer.data.copy_(copies[index])  # without a new version: graphs refer to the buffer
                    changed.add(index)
            elif buffer._version != versions[index]:
                raise CutError(
                    f"buffer '{name}' of a {type(module).__name__} changed while a forward pass ran again, for the "
                    "first time in this run: its value is lost.",
                    hint="Change it in every forward pass or in none, or not while lightning_pipe.is_recomputing().",
                )
            if replaced:
                changed.add(index)
        self._changing[stage] = changed


def _same(buffer: Tensor, copy: Tensor) -> bool:
    return buffer.is_meta or torch.equal(buffer, copy)
