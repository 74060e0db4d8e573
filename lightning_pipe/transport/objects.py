"""The one encoding of objects: a pickle of the structure, and the tensors in it flat beside it.

An object becomes one to several messages of bytes::

    first message, always FIRST bytes                    second, if all that does not fit
    +-------+-----------+-------+------------------------------------------------------+
    | sizes | structure | specs | tensors, as a MessageLayout places them              |
    +-------+-----------+-------+------------------------------------------------------+
    with ``by_reference`` every large tensor follows in a message of its own: its memory, without a copy

In shared memory an object is one message of its own size, written and read where it lies. Elsewhere a
receiver knows the size of the first message. It reads the size of the second one there, and the shapes of the large
tensors in the specs. So no message needs another one to announce it.

The structure goes along every time: it is short, and a cache of structures would have to be kept alike on all members.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.transport.message_layout import MessageLayout, strides_in_message

FIRST = 4096
"""Bytes of the first message of every object: most objects need no other."""
LARGE = 1 << 20
"""Tensors of this many bytes travel by themselves where their memory may be referred to."""
_SIZES = struct.Struct("=3q")  # bytes of the structure, of the specs and of the tensors
_REPEATED = 1 << 16
"""Bytes up to which an object that is written again is copied whole."""
_HOST = torch.device("cpu")


class _TensorEntry(NamedTuple):
    """What a receiver must know to make room for a tensor."""

    spec: TensorSpec
    on_device: bool
    requires_grad: bool
    separate: bool


class _Pickler(pickle.Pickler):
    """Takes plain tensors out of the pickle, which holds their numbers instead."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        # subclasses, sparse and quantized tensors know themselves how they are pickled; of a Parameter and of a sparse
        # tensor the plain tensors inside come back here
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.is_quantized or obj.is_meta:
            return None
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)  # which also keeps its id from being used again
        return number


class _Unpickler(pickle.Unpickler):
    """Puts the tensors back."""

    def __init__(self, data: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        tensor: Tensor = self._tensors[pid]
        return tensor


class PackedObject:
    """What becomes the messages of an object: any type that pickles.

    Tensors keep dtype, shape and, if their elements fill their memory, strides. What they were computed from stays
    behind, and so do attributes set on them and memory that they share.

    Args:
        obj: the object.
        by_reference: whether large tensors are left out.

    Attributes:
        size: bytes of all but the large tensors.
        separate: the large tensors as flat bytes.
    """

    def __init__(self, obj: object, *, by_reference: bool = False) -> None:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        pickler.dump(obj)
        structure, tensors = buffer.getvalue(), pickler.tensors
        entries = tuple(_entry(tensor, by_reference) for tensor in tensors)
        specs, self._layout = _described(entries)
        self._begin = _SIZES.pack(len(structure), len(specs), self._layout.size) + structure + specs
        self._small = [tensor for tensor, entry in zip(tensors, entries, strict=True) if not entry.separate]
        self.size = len(self._begin) + self._layout.size
        self._written: bytes | None = None
        self.separate = [
            as_bytes(tensor, _own_strides(entry.spec))
            for tensor, entry in zip(tensors, entries, strict=True)
            if entry.separate
        ]

    def write(self, address: int) -> None:
        """Write ``size`` bytes to host memory, for `read`."""
        if self._written is not None:
            ctypes.memmove(address, self._written, self.size)
            return
        ctypes.memmove(address, self._begin, len(self._begin))
        self._layout.write(address + len(self._begin), (), self._small)
        if self.size <= _REPEATED:  # for the other receivers
            self._written = ctypes.string_at(address, self.size)


def encode(obj: object, *, by_reference: bool = False) -> list[Tensor]:
    """The messages of an object, in the order in which a receiver takes them; see `PackedObject`.

    Args:
        obj: the object.
        by_reference: whether large tensors may be sent out of their own memory. The caller then changes none of them
            before the messages have been sent.
    """
    packed = PackedObject(obj, by_reference=by_reference)
    body = torch.empty(max(FIRST, packed.size), dtype=torch.uint8, device=_HOST)
    packed.write(body.data_ptr())
    messages = [body] if body.numel() == FIRST else [body[:FIRST], body[FIRST:]]
    return messages + packed.separate


def decode(receive: Callable[[Tensor], object], device: torch.device) -> Any:
    """The object in the messages of `encode`.

    Args:
        receive: fills the tensor that it gets with the next message, which has its size.
        device: where tensors of an accelerator arrive.
    """
    body = torch.empty(FIRST, dtype=torch.uint8, device=_HOST)
    receive(body)
    size = FIRST + rest_size(body)
    if size > FIRST:
        first, body = body, torch.empty(size, dtype=torch.uint8, device=_HOST)
        body[:FIRST] = first
        receive(body[FIRST:])
    return read(body.data_ptr(), device, receive)


def read(address: int, device: torch.device, receive: Callable[[Tensor], object] | None = None) -> Any:
    """The object that `PackedObject.write` has written to an address.

    Args:
        address: in host memory, which may be used otherwise afterwards.
        device: where tensors of an accelerator arrive.
        receive: fills the tensor that it gets with the next large tensor, if any was left out.
    """
    structure_size, specs_size, _ = _sizes(address)
    middle, begin = _SIZES.size + structure_size, _SIZES.size + structure_size + specs_size
    text = ctypes.string_at(address, begin)
    tensors = list(_tensors(text[middle:], address + begin, receive, device)) if specs_size else []
    return _Unpickler(text[_SIZES.size : middle], tensors).load()


def _tensors(
    specs: bytes, address: int, receive: Callable[[Tensor], object] | None, device: torch.device
) -> Iterator[Tensor]:
    """The tensors of an object; the small ones lie at an address, the others come in messages of their own."""
    entries, layout = _described_by(specs)
    # copied out of the message: a small tensor must not keep all of it alive
    small = iter(layout.read(address)[1])
    for entry in entries:
        place = device if entry.on_device else _HOST
        if entry.separate:
            assert receive is not None
            strides = strides_in_message(entry.spec)
            tensor = torch.empty_strided(entry.spec.shape, strides, dtype=entry.spec.dtype, device=place)
            receive(as_bytes(tensor, _own_strides(entry.spec)))
        else:
            tensor = next(small).to(place)
        yield tensor.requires_grad_(entry.requires_grad and not torch.is_inference_mode_enabled())


def rest_size(first: Tensor) -> int:
    """Bytes of the second message that follows a first one; 0 if there is none."""
    return max(0, _SIZES.size + sum(_sizes(first.data_ptr())) - FIRST)


def as_bytes(tensor: Tensor, strides: tuple[int, ...] | None = None) -> Tensor:
    """The values of a tensor as flat bytes: its own memory, if they lie there in the order that is asked for.

    Args:
        tensor: the tensor.
        strides: the order, as strides without gaps; ``None`` for row-major order.
    """
    if tensor._is_zerotensor():  # which has no memory
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    data = tensor.detach().resolve_conj().resolve_neg()
    if strides is None:
        data = data.contiguous()
    elif data.stride() != strides:
        data = torch.empty_strided(data.shape, strides, dtype=data.dtype, device=data.device).copy_(data)
    # a dimension of size 1 may have any stride and be contiguous, but torch views no other stride than 1 as bytes
    return data.as_strided((data.numel(),), (1,)).view(torch.uint8)


def _entry(tensor: Tensor, by_reference: bool) -> _TensorEntry:
    separate = by_reference and tensor.nbytes >= LARGE
    return _TensorEntry(TensorSpec.of(tensor), tensor.device.type != "cpu", tensor.requires_grad, separate)


def _own_strides(spec: TensorSpec) -> tuple[int, ...] | None:
    """The order in which the elements of a tensor travel: that of its memory if they fill it, else row-major."""
    return spec.strides if spec.dense else None


# the tensors of most batches are alike: to describe them anew takes longer than to copy small ones
@lru_cache(maxsize=128)
def _described(entries: tuple[_TensorEntry, ...]) -> tuple[bytes, MessageLayout]:
    """The specs of tensors as they stand in a message, and where the small ones lie."""
    return pickle.dumps(entries, protocol=pickle.HIGHEST_PROTOCOL) if entries else b"", _layout(entries)


@lru_cache(maxsize=128)
def _described_by(specs: bytes) -> tuple[tuple[_TensorEntry, ...], MessageLayout]:
    """The inverse of `_described`."""
    entries: tuple[_TensorEntry, ...] = pickle.loads(specs)
    return entries, _layout(entries)


def _layout(entries: tuple[_TensorEntry, ...]) -> MessageLayout:
    return MessageLayout(0, tuple(entry.spec for entry in entries if not entry.separate))


def _sizes(address: int) -> tuple[int, int, int]:
    structure, specs, tensors = _SIZES.unpack(ctypes.string_at(address, _SIZES.size))
    return structure, specs, tensors
