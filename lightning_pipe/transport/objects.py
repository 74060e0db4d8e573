"""The one encoding of objects: a pickle, beside which the memory of large tensors travels as it is (PEP 574).

An object becomes a text and, for each large tensor or array, a message with its memory::

    +--------+---------------------------------------+-------+--------+     +----------------------+
    | counts | pickle, with small tensors in it      | sizes | (fill) |     | memory               |   ...
    +--------+---------------------------------------+-------+--------+     +----------------------+

The text is a message of FIRST bytes, whose counts tell the size of a second one if there is more. The sizes are those
of what follows. So no message needs another one to announce it.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.tensor_spec import TensorSpec

FIRST = 4096
"""The smallest text, and as much as comes first of a larger one: most objects need no more."""
LARGE = 1 << 16
"""From so many bytes on memory travels by itself: below, a message costs more than a copy into the pickle."""
_COUNTS = struct.Struct("=2q")  # bytes of the pickle, and how many large pieces of memory follow
_HOST = torch.device("cpu")  # whatever device the user has made the default


def encode(obj: object, *, by_reference: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The text of an object and the memory of what is large in it, as flat bytes; any type that pickles.

    Tensors keep dtype, shape and, if their elements fill their memory, strides. What they were computed from stays
    behind, and so do attributes set on them and memory that they share.

    Args:
        obj: the object.
        by_reference: whether large tensors may be sent out of their own memory. The caller then changes none of them
            before the messages have been sent.
    """
    file, large = io.BytesIO(), list[Tensor]()

    def stays(buffer: pickle.PickleBuffer) -> bool:
        """Whether memory stays in the pickle."""
        memory = buffer.raw()
        if memory.nbytes < LARGE or memory.readonly:
            return True
        large.append(torch.frombuffer(memory, dtype=torch.uint8))
        return False

    file.seek(_COUNTS.size)
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=stays).dump(obj)
    size = file.tell() - _COUNTS.size
    file.write(struct.pack(f"={len(large)}q", *(each.numel() for each in large)))
    file.write(bytes(max(0, FIRST - file.tell())))
    file.seek(0)
    file.write(_COUNTS.pack(size, len(large)))
    text = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    return text, large if by_reference else [each.clone() for each in large]


def text_size(begin: bytes) -> int:
    """The size of a text, from its first bytes."""
    size, count = _COUNTS.unpack_from(begin)
    return max(FIRST, _COUNTS.size + size + 8 * count)  # type: ignore[no-any-return]


def decode(text: bytes, receive: Callable[[Tensor], object], device: torch.device) -> Any:
    """The object that was encoded.

    Args:
        text: the text.
        receive: fills the tensor that it gets with the next message, which has its size.
        device: where tensors of an accelerator arrive.
    """
    size, count = _COUNTS.unpack_from(text)
    large = []
    for each in struct.unpack_from(f"={count}q", text, _COUNTS.size + size):
        memory = torch.empty(each, dtype=torch.uint8, device=_HOST)
        receive(memory)
        large.append(memory.numpy())
    file = io.BytesIO(text)
    file.seek(_COUNTS.size)
    return _Unpickler(file, large, device).load()


class _Pickler(pickle.Pickler):
    """Hands over the memory of tensors; the callback keeps what is large out of the pickle."""

    def reducer_override(self, obj: Any) -> Any:
        # subclasses, sparse and quantized tensors know themselves how they are pickled; of a Parameter and of a sparse
        # tensor the plain tensors inside come back here
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.is_quantized or obj.is_meta:
            return NotImplemented
        spec = TensorSpec.of(obj)
        # in the order of its memory if the elements fill it, else row by row
        strides = spec.strides if spec.dense else None
        memory: Any
        if obj.nbytes < LARGE:
            values = _in_order(obj.cpu(), strides)
            memory = ctypes.string_at(values.data_ptr(), values.nbytes)
        else:
            memory = as_bytes(obj.cpu(), strides).numpy()
            memory = pickle.PickleBuffer(memory)
        return _tensor, (memory, spec.dtype, spec.shape, strides, not obj.is_cpu, obj.requires_grad)


class _Unpickler(pickle.Unpickler):
    """Makes tensors of the memory that has come."""

    def __init__(self, file: io.BytesIO, buffers: Sequence[Any], device: torch.device) -> None:
        super().__init__(file, buffers=buffers)
        self._device = device

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return partial(_tensor, device=self._device) if found is _tensor else found


def _tensor(
    memory: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    on_device: bool,
    requires_grad: bool,
    device: torch.device,
) -> Tensor:
    """The tensor with these elements. It keeps the memory of a message of its own, and copies other memory."""
    if isinstance(memory, bytes):
        tensor = _empty(shape, strides, dtype, _HOST)
        ctypes.memmove(tensor.data_ptr(), memory, len(memory))
    else:
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        tensor = torch.empty(0, dtype=dtype, device=_HOST).set_(storage, 0, shape, strides or ())
    if on_device:
        tensor = tensor.to(device)
    return tensor.requires_grad_(requires_grad and not torch.is_inference_mode_enabled())


def as_bytes(tensor: Tensor, strides: tuple[int, ...] | None = None) -> Tensor:
    """The values of a tensor as flat bytes: its own memory, if they lie there in the order that is asked for.

    Args:
        tensor: the tensor.
        strides: the order, as strides without gaps; ``None`` for row-major order.
    """
    data = _in_order(tensor, strides).detach()
    # a dimension of size 1 may have any stride and be contiguous, but torch views no other stride than 1 as bytes
    return data.as_strided((data.numel(),), (1,)).view(torch.uint8)


def _in_order(tensor: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """The tensor, or a copy of it, with its values in memory in the order that is asked for."""
    as_asked = tensor.is_contiguous() if strides is None else tensor.stride() == strides
    # of some tensors the values are computed when they are read
    if as_asked and not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()):
        return tensor
    with torch.no_grad():
        return _empty(tensor.shape, strides, tensor.dtype, tensor.device).copy_(tensor)


def _empty(shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    if strides is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)
