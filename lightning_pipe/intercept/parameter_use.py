"""What the interception must know about parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor, nn


class ParameterUse(Protocol):
    """The module's parameters and buffers outside layers, as the interception sees them."""

    def use(self, parameter: nn.Parameter, by: str = "") -> None:
        """Note that this stage uses ``parameter`` for real, in a function; raises if this rank does not hold it."""

    def holds_all(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether this rank may use some parameters."""

    def run(self, module: str) -> None:
        """Note that this stage runs an outside module."""

    def name_of(self, tensor: Tensor) -> str | None:
        """The dotted name of a parameter or buffer of the module, ``None`` for other tensors."""
