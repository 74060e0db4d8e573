"""``ordinary.data = recorded``: torch asks nobody, and the ordinary tensor would share memory that is not there.

Torch's setter looks at the class of the tensor on the left alone, and reading what it made ends the process (torch
2.13). While there are recorded tensors, ``torch.Tensor.data`` is therefore a property of ours.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.patches import replaced

DATA: Any = torch.Tensor.data
"""Torch's own property."""


class _Data:
    """Stands for ``torch.Tensor.data``.

    Args:
        assigned: what is assigned instead, for the tensor on the left and the value on the right.
    """

    __name__ = "data"
    """By which functions of torch are known to those who see all calls."""

    def __init__(self, assigned: Callable[[Tensor, Any], Any]) -> None:
        self._assigned = assigned

    def __get__(self, tensor: Tensor | None, owner: type | None = None) -> Any:
        return self if tensor is None else DATA.__get__(tensor, owner)

    def __set__(self, tensor: Tensor, value: Any) -> None:
        DATA.__set__(tensor, self._assigned(tensor, value))


class Alive:
    """Belongs to one recorded tensor and ends with it: ``swap_tensors`` refuses tensors with weak references."""


class Assignments:
    """Keeps the property in force while there are recorded tensors.

    Args:
        assigned: see `_Data`.

    Attributes:
        alive: what belongs to the recorded tensors.
    """

    def __init__(self, assigned: Callable[[Tensor, Any], Any]) -> None:
        self.property = _Data(assigned)
        self.alive: weakref.WeakSet[Alive] = weakref.WeakSet()
        self._replaced: Any = None
        self._lock = threading.Lock()

    def watch(self) -> Alive:
        """A recorded tensor is made.

        Returns:
            What it has to refer to.
        """
        alive = Alive()
        with self._lock:
            self.alive.add(alive)
            if self._replaced is None:
                self._replaced = replaced(torch.Tensor, "data", self.property)
                self._replaced.__enter__()
        return alive

    def settle(self) -> None:
        """Put torch's property back if no recorded tensor is left."""
        with self._lock:
            if self._replaced is not None and not self.alive:
                self._replaced.__exit__(None, None, None)
                self._replaced = None
