"""Finds tensors that are as long as the batch and hold no samples: masks over positions, class weights, tables.

Such tensors would be split along with the samples, and often nothing raises: a row of a mask is broadcast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.engine.containers import children
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.tensor_state import same_values

WHOLE = (
    "What belongs to all samples goes whole to every micro-batch if its first dimension has length 1 (mask[None]), or "
    "if it is a buffer of the module."
)
REMEDY = (
    f"{WHOLE} Or say how to split: PipeStrategy(split_batch=lambda batch, m: […]), where samples lie along dimension 1 "
    "by tensor.tensor_split(m, 1). micro_batches=1 runs the batch whole."
)
_BATCHES = 6
_LEAST = 4


def tensors_in(node: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch with their places."""
    if isinstance(node, Tensor):
        yield path, node
    for key, child in (children(node) or {}).items():
        yield from tensors_in(child, f"{path}.{key}" if dataclasses.is_dataclass(node) else f"{path}[{key!r}]")


def ambiguous(batch: Any, length: int) -> list[str]:
    """The tensors with the length of the batch of which another dimension has this length, too."""
    return [
        f"{path} {tuple(tensor.shape)}"
        for path, tensor in tensors_in(batch)
        if tensor.ndim > 1 and len(tensor) == length > 1 and length in tensor.shape[1:]
    ]


@dataclass
class Suspects:
    """Looks at the first batches that are split without the user's function.

    Causal masks are recognised by their values, and batches with time first by the loader's batch size: both raise.
    Tensors that stay the same from batch to batch while the others change are named, for a warning.
    """

    _before: dict[str, Tensor] = field(default_factory=dict)
    _same: dict[str, int] = field(default_factory=dict)
    _looked: int = 0

    def look(self, batch: Any, length: int, batch_size: int | None) -> list[str]:
        """Look at a batch; returns the places of tensors that seem to be no samples.

        Args:
            batch: the batch.
            length: the number of its samples.
            batch_size: samples of a full batch, if the loader knows them.

        Raises:
            ConfigurationError: a tensor is no samples, or the samples lie along another dimension.
        """
        self._looked += 1
        if self._looked > _BATCHES or length < 2:
            self._before = {}
            return []
        found = {path: t for path, t in tensors_in(batch) if t.ndim and len(t) == length and t.layout is torch.strided}
        _check_order(found, length, batch_size)
        for path, tensor in found.items():
            if _is_causal(tensor):
                raise ConfigurationError(
                    f"{path}, {tuple(tensor.shape)}, is a causal mask: as long as the batch, it would be cut into "
                    f"micro-batches like the {length} samples.",
                    hint=REMEDY,
                )
        return self._recurring(found)

    def _recurring(self, found: Mapping[str, Tensor]) -> list[str]:
        before, self._before = self._before, dict(found)
        same = {path for path, tensor in found.items() if path in before and same_values(tensor, before[path])}
        if not before or same == found.keys():
            return []  # the same batch came again
        self._same = {path: self._same.get(path, 0) + 1 for path in same}
        suspicious = []
        for path, times in self._same.items():
            tensor = found[path]
            # labels may be the same by chance, measured values are not
            enough = 1 if tensor.is_floating_point() else _LEAST
            if times == enough and bool((tensor != tensor[:1]).any()):
                suspicious.append(f"{path} {tuple(tensor.shape)}")
        return suspicious


def suspicion(places: list[str]) -> str:
    """The warning for tensors that stay the same."""
    return (
        f"{', '.join(places)}: as long as the batch, and the same in every batch. It is cut into micro-batches as if "
        f"it held one entry for each sample. {REMEDY} If it is samples, all is well."
    )


def _check_order(found: Mapping[str, Tensor], length: int, batch_size: int | None) -> None:
    if batch_size is None or batch_size == length or not found:
        return
    if all(tensor.ndim > 1 and tensor.shape[1] == batch_size for tensor in found.values()):
        path, tensor = next(iter(found.items()))
        raise ConfigurationError(
            f"The samples seem to lie along dimension 1: {path} is {tuple(tensor.shape)}, and the DataLoader makes "
            f"batches of {batch_size} samples.",
            hint=f"Put the samples first. {REMEDY}",
        )


def _is_causal(tensor: Tensor) -> bool:
    """Whether a square holds one value on and below the diagonal and another one above it, or the other way round."""
    if tensor.ndim != 2 or tensor.shape[0] != tensor.shape[1] or len(tensor) < _LEAST:
        return False
    lower = torch.ones_like(tensor, dtype=torch.bool).tril()
    for inside in (lower, lower.T):
        one, other = tensor[inside], tensor[~inside]
        if bool((one == one[0]).all() & (other == other[0]).all() & (one[0] != other[0])):
            return True
    return False
