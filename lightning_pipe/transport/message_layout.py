"""Tensors of known shapes and a few control words in one flat message.

::

    | control words | pad | tensor | pad | tensor | pad |      every tensor begins at a multiple of 16 bytes

Both ends have the layout, so the message says nothing about itself. Objects whose tensors only the sender knows have an
encoding of their own, `lightning_pipe.transport.objects`, which carries the layout along.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from lightning_pipe.tensor_spec import TensorSpec

_ALIGNMENT = 16  # torch views bytes as complex128 only at such offsets
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class MessageLayout:
    """Where control words and tensors lie in a message.

    Args:
        words: number of 64-bit control words at the beginning.
        specs: shapes and dtypes of the tensors behind them.

    Example:
        >>> layout = MessageLayout(1, (TensorSpec((2,), torch.float32),))
        >>> layout.size
        32
        >>> message = layout.pack([7], [torch.ones(2)], torch.device("cpu"))
        >>> layout.read(message.data_ptr())
        ([7], [tensor([1., 1.])])
    """

    words: int
    specs: tuple[TensorSpec, ...]

    @cached_property
    def _parts(self) -> tuple[tuple[int, int], ...]:
        parts, offset = [], _aligned(8 * self.words)
        for spec in self.specs:
            count = torch.Size(spec.shape).numel() * spec.dtype.itemsize
            parts.append((offset, count))
            offset = _aligned(offset + count)
        return (*parts, (offset, 0))

    @cached_property
    def _control(self) -> struct.Struct:
        return struct.Struct(f"={self.words}q")

    @cached_property
    def _strides(self) -> tuple[tuple[int, ...], ...]:
        return tuple(strides_in_message(spec) for spec in self.specs)

    @cached_property
    def size(self) -> int:
        """Bytes of the whole message."""
        return self._parts[-1][0]

    def pack(self, control: Sequence[int], tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
        """A message; the places of missing tensors are left as they are."""
        data = torch.empty(self.size, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            self.write(data.data_ptr(), control, tensors)
            return data
        for tensor, (offset, count), spec, strides in self._places(tensors):
            if tensor is not None and count:
                with torch.no_grad():
                    data[offset : offset + count].view(spec.dtype).as_strided(spec.shape, strides).copy_(tensor)
        return data

    def write(self, address: int, control: Sequence[int], tensors: Sequence[Tensor | None]) -> None:
        """Write a message to host memory."""
        # plain copies of memory: torch's calls take several times as long for a small tensor
        if control:
            ctypes.memmove(address, self._control.pack(*control), self._control.size)
        for tensor, (offset, count), spec, strides in self._places(tensors):
            if tensor is None or not count:
                continue
            raw = tensor
            if not _is_raw(tensor, spec, strides):
                # of another dtype, on a device, with gaps, or with values that are computed when they are read
                with torch.no_grad():
                    raw = torch.empty_strided(spec.shape, strides, dtype=spec.dtype, device=_HOST).copy_(tensor)
            ctypes.memmove(address + offset, raw.data_ptr(), count)

    def _places(
        self, tensors: Sequence[Tensor | None]
    ) -> Iterator[tuple[Tensor | None, tuple[int, int], TensorSpec, tuple[int, ...]]]:
        """Each tensor with its offset and size in bytes, its specification and its strides."""
        return zip(tensors, self._parts, self.specs, self._strides, strict=False)

    def read(self, address: int) -> tuple[list[int], list[Tensor]]:
        """The control words of a message in host memory, and copies of its tensors."""
        tensors = []
        for (offset, count), spec, strides in zip(self._parts, self.specs, self._strides, strict=False):
            tensor = torch.empty_strided(spec.shape, strides, dtype=spec.dtype, device=_HOST)
            if count:
                ctypes.memmove(tensor.data_ptr(), address + offset, count)
            tensors.append(tensor)
        return list(self._control.unpack(ctypes.string_at(address, self._control.size))), tensors

    def tensors(self, data: Tensor) -> list[Tensor]:
        """The tensors; they share the message's memory but not its version counter."""
        storage = data.untyped_storage()
        tensors = []
        for (offset, _), spec, strides in zip(self._parts, self.specs, self._strides, strict=False):
            # a view would share the version counter, and autograd would take a change of one for a change of all
            tensor = torch.empty(0, dtype=spec.dtype, device=data.device)
            tensors.append(tensor.set_(storage, offset // spec.dtype.itemsize, spec.shape, strides))
        return tensors


def _is_raw(tensor: Tensor, spec: TensorSpec, strides: tuple[int, ...]) -> bool:
    """Whether a tensor lies in host memory as it is to lie in the message, byte for byte."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.dtype == spec.dtype
        and tensor.shape == spec.shape
        and (tensor.is_contiguous() if spec.strides is None else tensor.stride() == strides)
        and not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor())
    )


def strides_in_message(spec: TensorSpec) -> tuple[int, ...]:
    """The strides in the message: the tensor's own if it is dense, else those of a contiguous one."""
    if spec.strides is not None and spec.dense:
        return spec.strides
    return tuple(accumulate(reversed(spec.shape[1:]), mul, initial=1))[::-1] if spec.shape else ()


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
