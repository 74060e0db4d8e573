"""The one encoding of objects: a pickle, beside which the memory of large tensors travels as it is (PEP 574).

An object becomes a text and, for each large tensor or array, a message with its memory::

    +--------+---------------------------------------+-------+--------+     +----------------------+
    | counts | pickle, with small tensors in it      | sizes | (fill) |     | memory               |   ...
    +--------+---------------------------------------+-------+--------+     +----------------------+

The text is a message of FIRST bytes, whose counts tell the size of a second one if there is more. The sizes are those
of what follows. So no message needs another one to announce it.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.errors import ConfigurationError

FIRST = 4096
"""The smallest text, and as much as comes first of a larger one: most objects need no more."""
LARGE = 1 << 16
"""From so many bytes on memory travels by itself: below, a message costs more than a copy into the pickle."""
_COUNTS = struct.Struct("=2q")  # bytes of the pickle, and how many large pieces of memory follow
_HOST = torch.device("cpu")  # whatever device the user has made the default


def encode(obj: object, *, by_reference: bool = False) -> list[Tensor]:
    """The messages of an object, as flat bytes: its text in one or two, and the memory of what is large in it.

    Any type that pickles. Tensors keep dtype, shape and, if their elements fill their memory, strides. What they were
    computed from stays behind, and so do attributes set on them and memory that they share.

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
    try:
        _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=stays).dump(obj)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"Something that ranks share, such as a batch or what a step returns, does not pickle: {error}.",
            hint="Let it hold tensors, numbers, strings, containers, and objects of classes that modules name.",
        ) from error
    end = file.tell()
    file.write(struct.pack(f"={len(large)}q", *[each.numel() for each in large]).ljust(FIRST - end, b"\0"))
    _COUNTS.pack_into(memory := file.getbuffer(), 0, end - _COUNTS.size, len(large))
    text = torch.frombuffer(memory, dtype=torch.uint8)
    texts = [text] if text.numel() == FIRST else [text[:FIRST], text[FIRST:]]
    return texts + (large if by_reference else [each.clone() for each in large])


def decode(receive: Callable[[Tensor], object], device: torch.device) -> Any:
    """The object that was encoded.

    Args:
        receive: fills the tensor that it gets with the next message, which has its size.
        device: where tensors of an accelerator arrive.
    """

    def message(size: int) -> Any:
        memory = torch.empty(size, dtype=torch.uint8, device=_HOST)
        receive(memory)
        return memory.numpy()

    text = message(FIRST).tobytes()
    size, count = _COUNTS.unpack_from(text)
    if (more := _COUNTS.size + size + 8 * count - FIRST) > 0:
        text += message(more).tobytes()
    large = [message(each) for each in struct.unpack_from(f"={count}q", text, _COUNTS.size + size)]
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
        values = obj.detach().cpu().resolve_conj().resolve_neg()
        # elements that do not fill their memory, or are computed when they are read
        if values.untyped_storage().nbytes() != values.nbytes or values._is_zerotensor():
            values = torch.empty_like(values).copy_(values)
        memory: Any = torch.empty(0, dtype=torch.uint8, device=_HOST).set_(values.untyped_storage()).numpy()
        place = (values.storage_offset(), tuple(values.shape), values.stride())
        return _tensor, (pickle.PickleBuffer(memory), values.dtype, place, not obj.is_cpu, obj.requires_grad)


class _Unpickler(pickle.Unpickler):
    """Makes tensors of the memory that has come."""

    def __init__(self, file: io.BytesIO, buffers: Sequence[Any], device: torch.device) -> None:
        super().__init__(file, buffers=buffers)
        self._device = device

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return partial(_tensor, device=self._device) if found is _tensor else found


def _tensor(
    memory: Any, dtype: torch.dtype, place: tuple[Any, ...], on_device: bool, requires_grad: bool, device: torch.device
) -> Tensor:
    """The tensor with these elements, in the memory that has come."""
    tensor = torch.empty(0, dtype=dtype, device=_HOST)
    storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage() if len(memory) else tensor.untyped_storage()
    tensor.set_(storage, *place)
    if on_device:
        tensor = tensor.to(device)
    return tensor.requires_grad_() if requires_grad and not torch.is_inference_mode_enabled() else tensor
