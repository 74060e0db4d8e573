"""Causal masks over as many positions as the batch has samples.

They would be cut along with the samples, and often nothing would raise: a row of a mask is broadcast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.engine.containers import children
from lightning_pipe.errors import ConfigurationError

WHOLE = (
    "What belongs to all samples goes whole to every micro-batch if its first dimension has length 1 (mask[None]), or "
    "if it is a buffer of the module."
)
_REMEDY = (
    f"{WHOLE} Or say how to split, and what a part counts: PipeStrategy(split_batch=lambda batch, m: […], "
    "loss_weight=lambda part: …), where samples lie along dimension 1 by tensor.tensor_split(m, 1) and "
    "tensor.shape[1]. micro_batches=1 runs the batch whole."
)
_LEAST = 4
"""A smaller square may look like a causal mask by chance."""


def check_no_causal_mask(batch: Any, length: int) -> None:
    """Refuse to cut a causal mask over as many positions as there are samples.

    Raises:
        ConfigurationError: there is one.
    """
    for path, tensor in _lying_both_ways(batch, length):
        if _is_causal(tensor):
            raise ConfigurationError(
                f"{path}, {tuple(tensor.shape)}, is a causal mask: as long as the batch, it would be cut into "
                f"micro-batches like the {length} samples.",
                hint=_REMEDY,
            )


def _lying_both_ways(node: Any, length: int, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    if isinstance(node, Tensor):
        if node.ndim > 1 and node.shape[0] == length > 1 and length in node.shape[1:]:
            yield path, node
        return
    named = dataclasses.is_dataclass(node)
    for key, child in (children(node) or {}).items():
        yield from _lying_both_ways(child, length, f"{path}.{key}" if named else f"{path}[{key!r}]")


def _is_causal(tensor: Tensor) -> bool:
    """Whether a square holds one value on and below the diagonal and another one above it, or the other way round."""
    if tensor.ndim != 2 or len(tensor) < _LEAST or tensor.layout is not torch.strided:
        return False
    lower = torch.ones_like(tensor, dtype=torch.bool).tril()
    for inside in (lower, lower.T):
        one, other = tensor[inside], tensor[~inside]
        if bool((one == one[0]).all() & (other == other[0]).all() & (one[0] != other[0])):
            return True
    return False
