"""Tensors and objects as flat messages of bytes.

Those of objects have a head of fixed size, and a body if the object does not fit into it.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor

HEAD = 1024
"""Bytes of a head. Objects up to this size, less eight bytes, travel in the message that announces their size."""


def pack(obj: object) -> tuple[Tensor, Tensor | None]:
    """An object as a head of fixed size (length, content if it fits) and a body if it does not."""
    data = pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    head = bytearray(HEAD)
    head[:8] = len(data).to_bytes(8, "little")
    if len(data) > HEAD - 8:
        return torch.frombuffer(head, dtype=torch.uint8), torch.frombuffer(bytearray(data), dtype=torch.uint8)
    head[8 : 8 + len(data)] = data
    return torch.frombuffer(head, dtype=torch.uint8), None


def body_size(head: Tensor) -> int:
    """Bytes of the body that follows a head; 0 if all is in the head."""
    size = int.from_bytes(head[:8].numpy().tobytes(), "little")
    return size if size > HEAD - 8 else 0


def unpack(head: Tensor) -> Any:
    """The object in a head that has no body."""
    return pickle.loads(head[8:].numpy().data)


def as_bytes(tensor: Tensor) -> Tensor:
    """The values of a tensor in row-major order as flat bytes: its own memory, if they lie there like that."""
    if tensor._is_zerotensor():  # which has no memory
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    data = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # a dimension of size 1 may have any stride and be contiguous, but torch views no other stride than 1 as bytes
    return data.as_strided((data.numel(),), (1,)).view(torch.uint8)
