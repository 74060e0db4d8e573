"""Objects from one process to others: the structure as a pickle, the tensors in it flat beside it."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_pipe.transport.base import Work
from lightning_pipe.transport.objects import as_bytes

_FIRST = 4096
"""Bytes of the first packet, which has the same size in every message: most messages need no other."""
_HEAD = 24
_ALONE = 1 << 20
"""Tensors of this many bytes travel by themselves; smaller ones are packed together."""
_ALIGNMENT = 16


class Broadcasts(Protocol):
    """What carries the messages: a transport, or `OneWay`."""

    @property
    def process(self) -> int:
        """This process."""

    @property
    def device(self) -> torch.device:
        """Where tensors of an accelerator arrive."""

    def broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Work:
        """Start to copy the source's contiguous tensor into those of the other members."""


@dataclass(frozen=True)
class _Spec:
    """What a receiver must know to make room for a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_device: bool
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class _Pickler(pickle.Pickler):
    """Takes plain tensors out of the pickle, which holds their specs instead."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.specs: list[_Spec] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.is_quantized or obj.is_meta:
            return None
        number = self._numbers.get(id(obj))
        if number is None:
            number = self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
            self.specs.append(_Spec(obj.dtype, tuple(obj.shape), obj.device.type != "cpu", obj.requires_grad))
        return number


class _Unpickler(pickle.Unpickler):
    """Puts the tensors back."""

    def __init__(self, data: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        tensor: Tensor = self._tensors[pid]
        return tensor


def broadcast(transport: Broadcasts, obj: Any, source: int, members: tuple[int, ...]) -> Any:
    """Send an object from one process to the other members of a group.

    Any type that pickles will do. Tensors keep dtype and shape; those of an accelerator arrive on the receiver's own
    device. What they were computed from stays behind. The structure goes along in every message: it is short, and a
    cache of structures would have to be kept alike on all members.

    Args:
        transport: what carries the messages; the group has been made.
        obj: the object, on the source; ignored elsewhere.
        source: the process that sends.
        members: the processes of the group, sorted.

    Returns:
        The source's own object there, a copy elsewhere.
    """
    if len(members) == 1:
        return obj
    if transport.process == source:
        _send(transport, obj, members)
        return obj
    return _receive(transport, source, members)


def _send(transport: Broadcasts, obj: Any, members: tuple[int, ...]) -> None:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(obj)
    structure = buffer.getvalue()
    specs = pickle.dumps(pickler.specs, protocol=pickle.HIGHEST_PROTOCOL) if pickler.specs else b""
    tensors = pickler.tensors
    packed = [as_bytes(t.cpu()) for t, spec in zip(tensors, pickler.specs, strict=True) if spec.nbytes < _ALONE]
    head = torch.tensor([len(structure), len(specs), sum(_padded(p.numel()) for p in packed)])
    body = torch.empty(max(_FIRST, _HEAD + int(head.sum())), dtype=torch.uint8)
    body[:_HEAD] = head.view(torch.uint8)
    position = _HEAD
    if structure + specs:
        words = torch.frombuffer(bytearray(structure + specs), dtype=torch.uint8)
        body[position : position + words.numel()] = words
        position += words.numel()
    for part in packed:
        body[position : position + part.numel()] = part
        position += _padded(part.numel())
    works = [transport.broadcast(body[:_FIRST], transport.process, members)]
    if body.numel() > _FIRST:
        works.append(transport.broadcast(body[_FIRST:], transport.process, members))
    large = [as_bytes(t) for t, spec in zip(tensors, pickler.specs, strict=True) if spec.nbytes >= _ALONE]
    works += [transport.broadcast(part, transport.process, members) for part in large]
    for work in works:
        work.wait()


def _receive(transport: Broadcasts, source: int, members: tuple[int, ...]) -> Any:
    first = torch.empty(_FIRST, dtype=torch.uint8)
    transport.broadcast(first, source, members).wait()
    structure_size, specs_size, packed_size = first[:_HEAD].view(torch.int64).tolist()
    total = _HEAD + structure_size + specs_size + packed_size
    body = first
    if total > _FIRST:
        rest = torch.empty(total - _FIRST, dtype=torch.uint8)
        transport.broadcast(rest, source, members).wait()
        body = torch.cat([first, rest])
    data = body[_HEAD : _HEAD + structure_size + specs_size].numpy().tobytes()
    structure, specs = data[:structure_size], data[structure_size:]
    position = _HEAD + structure_size + specs_size
    tensors: list[Tensor] = []
    for spec in pickle.loads(specs) if specs else []:
        device = transport.device if spec.on_device else torch.device("cpu")
        if spec.nbytes < _ALONE:
            # cloned: the bytes have no alignment, and a small tensor must not keep the whole message alive
            part = body[position : position + spec.nbytes].clone()
            position += _padded(spec.nbytes)
            tensor = part.view(spec.dtype).view(spec.shape).to(device)
        else:
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
            transport.broadcast(as_bytes(tensor), source, members).wait()
        tensors.append(tensor.requires_grad_(spec.requires_grad and not torch.is_inference_mode_enabled()))
    return _Unpickler(structure, tensors).load()


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
