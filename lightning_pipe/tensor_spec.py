"""What is known of a tensor that does not exist yet on this rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TensorSpec(NamedTuple):
    """Shape, dtype and strides of a tensor that does not exist yet on this rank.

    Strides count: they decide whether ``contiguous()`` or ``reshape()`` return a copy or the tensor itself, and so
    what a later change in place reaches. ``None`` means contiguous. The type of the device counts for what a function
    has moved from one to another.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None
    device: str | None = None

    @classmethod
    def of(cls, tensor: Tensor, device: str | None = None) -> TensorSpec:
        """The specification of a tensor, with the type of its device if that counts."""
        return cls(tuple(tensor.shape), tensor.dtype, None if tensor.is_contiguous() else tensor.stride(), device)

    @property
    def dense(self) -> bool:
        """Whether the elements fill their memory without gaps and overlaps, in whatever order."""
        expected = 1
        for stride, size in self._by_stride():
            if stride != expected:
                return False
            expected *= size
        return True

    @property
    def overlaps(self) -> bool:
        """Whether elements lie on each other other than by ``expand``: sliding windows."""
        extent = 0
        for stride, size in self._by_stride():
            if 0 < stride <= extent:
                return True
            extent += stride * (size - 1)
        return False

    def lay_out(self, value: Tensor) -> Tensor:
        """The arrived values with the strides that the tensor had; sliding windows excepted."""
        strides = self.strides
        if strides is None or value.stride() == strides or self.overlaps:
            return value
        sizes = [size if stride else 1 for size, stride in zip(self.shape, strides, strict=True)]
        laid = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        return laid.copy_(value[tuple(slice(size) for size in sizes)]).expand(self.shape)

    def _by_stride(self) -> list[tuple[int, int]]:
        if self.strides is None:
            return []
        return sorted((stride, size) for stride, size in zip(self.strides, self.shape, strict=True) if size != 1)


def numbered(device: torch.device) -> torch.device:
    """The device that a tensor made on ``device`` says: with the index of the current one where none is given."""
    if str(device) == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
