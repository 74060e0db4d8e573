"""What ranks that take turns tell each other."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from lightning_pipe.intercept.call_record import CallRecord
from lightning_pipe.tensor_spec import TensorSpec


class Mail(Protocol):
    """Brings objects to the other ranks of a pipeline; those from one rank arrive in order."""

    rank: int
    ranks: int

    def send(self, obj: Any, rank: int) -> None:
        """Start to send an object, which may be changed at once."""

    def receive(self, rank: int) -> Any:
        """The next object that a rank sends."""


class Sent(NamedTuple):
    """The value of a tensor; ``shared`` if its memory belongs to another tensor, too, where it comes from."""

    spec: TensorSpec
    value: Tensor
    shared: bool


class Turn(NamedTuple):
    """What a rank did in its turn.

    Args:
        calls: those outside layers, and of layers.
        values: those that the next rank needs, by number.
    """

    calls: tuple[CallRecord, ...]
    values: dict[int, Sent]
