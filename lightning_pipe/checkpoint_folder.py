"""A checkpoint as a folder that all ranks write and read together, for models that no host can hold.

Tensors go through ``torch.distributed.checkpoint``; everything else is in one small file beside them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from lightning_pipe.pipeline.transport import Transport
from lightning_pipe.shipment import (
    REMOVED,
    Path,
    Pending,
    Shipment,
    assembled,
    check_known,
    leaves,
    receive_items,
    send_items,
)

_REST = "meta.pt"


def is_folder(path: str) -> bool:
    """Whether there is such a checkpoint."""
    return os.path.isfile(os.path.join(path, _REST))


def save(
    path: str,
    checkpoint: dict[str, Any],
    mine: Shipment,
    transport: Transport,
    speaker: int,
    parameter_names: Sequence[Sequence[str | None]],
) -> None:
    """Write a folder. Collective over the world; replicas beside the first have nothing to add.

    Args:
        path: the folder; one that is there is replaced.
        checkpoint: as this process has dumped it.
        mine: what this rank owns of it.
        transport: this process's transport.
        speaker: the pipeline rank that writes what is not a tensor.
        parameter_names: for each optimizer the names of its parameters.
    """
    first = transport.replica == 0
    writes = first and transport.rank == speaker
    if writes and os.path.lexists(path):
        shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    transport.barrier()
    if first and not writes:
        send_items(mine, transport, speaker)
    if writes:
        others = [rank for rank in range(transport.topology.ranks) if rank != speaker]
        shipments = [(mine.items, mine.keys), *(receive_items(transport, rank) for rank in others)]
        os.makedirs(path, exist_ok=True)
        _write_rest(os.path.join(path, _REST), checkpoint, shipments, parameter_names)
    tensors = dict(zip(mine.keys, mine.tensors, strict=True)) if first else {}
    save_tensors(tensors, checkpoint_id=path, no_dist=not _distributed())
    transport.barrier()


def load(path: str, wanted: Callable[[Path, Sequence[Sequence[str | None]]], bool], weights_only: bool | None) -> Any:
    """Read what this rank needs of a folder. Collective over the world.

    Args:
        path: the folder.
        wanted: whether the tensor at a path of the checkpoint is needed; gets the names of the optimizers' parameters.
        weights_only: as for ``torch.load``.

    Returns:
        The checkpoint; tensors that are not needed are on the meta device.
    """
    rest = torch.load(os.path.join(path, _REST), map_location="cpu", weights_only=weights_only)
    tensors: dict[str, Tensor] = {}
    entries: list[tuple[Path, Any]] = [(tuple(at), value) for at, value in rest["values"]]
    for at, key in rest["tensors"]:
        like: Tensor = rest["like"][key]
        if wanted(tuple(at), rest["parameter_names"]):
            like = tensors.setdefault(key, torch.empty(like.shape, dtype=like.dtype))
        entries.append((tuple(at), like))
    load_tensors(tensors, checkpoint_id=path, no_dist=not _distributed())
    return assembled(rest["checkpoint"], entries)


def _write_rest(
    path: str,
    checkpoint: dict[str, Any],
    shipments: Sequence[tuple[list[tuple[Path, Any]], list[str]]],
    parameter_names: Sequence[Sequence[str | None]],
) -> None:
    """What is not a tensor, and where the tensors belong: plain types, so that any ``torch.load`` reads it."""
    ends = [
        (at, leaf, keys) for items, keys in shipments for path_, value in items for at, leaf in leaves(path_, value)
    ]
    pending = [(at, keys[leaf.number], leaf) for at, leaf, keys in ends if isinstance(leaf, Pending)]
    rest = {
        "checkpoint": assembled(checkpoint, [(at, REMOVED) for items, _ in shipments for at, _ in items]),
        "values": [(list(at), leaf) for at, leaf, _ in ends if not isinstance(leaf, Pending)],
        "tensors": [(list(at), key) for at, key, _ in pending],
        "like": {key: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for _, key, leaf in pending},
        "parameter_names": [list(names) for names in parameter_names],
    }
    check_known(rest["checkpoint"])
    torch.save(rest, path)


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
