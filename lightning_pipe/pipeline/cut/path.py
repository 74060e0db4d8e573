"""What a run of the user's step did up to a cut, and what is alive there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor that does not exist yet on this rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The specification of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)


class Passed(NamedTuple):
    """A result that is one of the call's own arguments, the same object."""

    argument: int


class Call(NamedTuple):
    """One recorded call outside layers, or of one layer or outside module.

    Args:
        name: torch function, or dotted name of the layer or module.
        numbers: the numbers given to the tensors in its result, in order.
        structure: for layers and modules, the pytree structure of the result; ``None`` for torch functions.
        leaves: for layers and modules, the result's leaves: :class:`TensorSpec`, :class:`Passed`, or plain values.
        mutated: for layers and modules, the arguments changed in place (positions among the argument's tensors).
    """

    name: str
    numbers: tuple[int, ...]
    structure: Any = None
    leaves: tuple[Any, ...] = ()
    mutated: tuple[int, ...] = ()


class Entry(NamedTuple):
    """One tensor that is alive at a cut.

    ``shared`` marks tensors whose memory another live tensor shares: they travel as copies, so changing one in place
    after the cut would be wrong, and raises.
    """

    number: int
    spec: TensorSpec
    requires_grad: bool
    shared: bool


@dataclass(frozen=True)
class Path:
    """The calls up to a cut and the tensors alive there: what two stages must agree on."""

    calls: tuple[Call, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Crossing:
    """What leaves a stage at its cut: the path and, for each entry, the tensor itself (with its graph)."""

    path: Path
    tensors: tuple[Tensor, ...]
