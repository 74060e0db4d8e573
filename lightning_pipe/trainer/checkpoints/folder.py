"""A checkpoint as a folder that all ranks write and read together, for models that no host can hold.

Tensors go through ``torch.distributed.checkpoint``; everything else is in one small file beside them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from lightning_pipe.errors import CheckpointError, PipeError
from lightning_pipe.trainer.checkpoints import file
from lightning_pipe.trainer.checkpoints.rank_entries import (
    REMOVED,
    Path,
    Pending,
    RankEntries,
    assembled,
    check_known,
    leaves,
    receive_items,
    send_items,
)
from lightning_pipe.trainer.checkpoints.unfinished import naming, reason, replacing
from lightning_pipe.transport.base import Transport

REST = "meta.pt"
_COMPLETE = ".metadata"
"""The file that torch writes last."""


def is_folder(path: str) -> bool:
    """Whether the path is such a checkpoint, or an incomplete one."""
    return os.path.isdir(path) and any(
        name in (REST, _COMPLETE) or name.endswith(".distcp") for name in os.listdir(path)
    )


def save(
    path: str,
    checkpoint: dict[str, Any],
    mine: RankEntries,
    transport: Transport,
    writer: int,
    parameter_names: Sequence[Sequence[str | None]],
) -> None:
    """Write a folder. Collective over the world; replicas beside the first have nothing to add.

    Args:
        path: the folder; one that is there is replaced.
        checkpoint: as this process has dumped it.
        mine: what this rank owns of it.
        transport: this process's transport.
        writer: the pipeline rank that writes what is not a tensor.
        parameter_names: for each optimizer the names of its parameters.
    """
    first, topology = transport.replica == 0, transport.topology
    writes = first and transport.rank == writer
    with replacing(path, folder=True) if writes else nullcontext("") as made:
        unfinished = transport.broadcast_object(made, topology.process(0, writer), tuple(range(topology.world_size)))
        if first and not writes:
            send_items(mine, transport, writer)
        if writes:
            others = [rank for rank in range(topology.ranks) if rank != writer]
            entries_of_ranks = [(mine.items, mine.keys), *(receive_items(transport, rank) for rank in others)]
            with naming(path, unfinished):
                _write_rest(os.path.join(unfinished, REST), checkpoint, entries_of_ranks, parameter_names)
        tensors = dict(zip(mine.keys, mine.tensors, strict=True)) if first else {}
        with _naming_errors(transport, path, "written"):
            save_tensors(tensors, checkpoint_id=unfinished, no_dist=not _distributed())
    transport.barrier()


def load(
    path: str,
    wanted: Callable[[Path, Sequence[Sequence[str | None]]], bool],
    weights_only: bool | None,
    transport: Transport,
) -> Any:
    """Read what this rank needs of a folder. Collective over the world.

    Args:
        path: the folder.
        wanted: whether the tensor at a path of the checkpoint is needed; gets the names of the optimizers' parameters.
        weights_only: as for ``torch.load``.
        transport: this process's transport.

    Returns:
        The checkpoint; tensors that are not needed are on the meta device.
    """
    rest = read_rest(path, weights_only)
    tensors: dict[str, Tensor] = {}
    entries: list[tuple[Path, Any]] = [(tuple(at), value) for at, value in rest["values"]]
    for at, key in rest["tensors"]:
        like: Tensor = rest["like"][key]
        if wanted(tuple(at), rest["parameter_names"]):
            like = tensors.setdefault(key, torch.empty(like.shape, dtype=like.dtype))
        entries.append((tuple(at), like))
    with _naming_errors(transport, path, "read"):
        load_tensors(tensors, checkpoint_id=path, no_dist=not _distributed())
    return assembled(rest["checkpoint"], entries)


def read_rest(path: str, weights_only: bool | None) -> dict[str, Any]:
    """What is no tensor in a folder, and the paths of the tensors.

    Raises:
        CheckpointError: the folder is not complete.
    """
    missing = [name for name in (REST, _COMPLETE) if not os.path.isfile(os.path.join(path, name))]
    if missing:
        raise CheckpointError(
            f"The folder {path} is no complete checkpoint: it has no {' and no '.join(missing)}.",
            hint="The run that wrote it ended before it was done. Resume from another checkpoint.",
        )
    rest: dict[str, Any] = file.read(os.path.join(path, REST), weights_only)
    return rest


def _write_rest(
    path: str,
    checkpoint: dict[str, Any],
    entries_of_ranks: Sequence[tuple[list[tuple[Path, Any]], list[str]]],
    parameter_names: Sequence[Sequence[str | None]],
) -> None:
    """Write all that is not a tensor, and the paths of the tensors, in plain types that any ``torch.load`` reads."""
    ends = [
        (at, leaf, keys)
        for items, keys in entries_of_ranks
        for path_, value in items
        for at, leaf in leaves(path_, value)
    ]
    pending = [(at, keys[leaf.number], leaf) for at, leaf, keys in ends if isinstance(leaf, Pending)]
    rest = {
        "checkpoint": assembled(checkpoint, [(at, REMOVED) for items, _ in entries_of_ranks for at, _ in items]),
        "values": [(list(at), leaf) for at, leaf, _ in ends if not isinstance(leaf, Pending)],
        "tensors": [(list(at), key) for at, key, _ in pending],
        "like": {key: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for _, key, leaf in pending},
        "parameter_names": [list(names) for names in parameter_names],
    }
    check_known(rest["checkpoint"])
    torch.save(rest, path)


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextmanager
def _naming_errors(transport: Transport, path: str, verb: str) -> Iterator[None]:
    """Name the checkpoint and the rank that failed in errors; torch's collectives do not know the failure board."""
    operation = f"wait until the checkpoint {path} was {verb} by all"
    try:
        yield
    except CheckpointException as error:  # derives from BaseException, and has one text for all ranks (torch 2.13)
        process, (cause, _) = next(iter(error.failures.items()))
        text, who = reason(cause, path), transport.describe(process)
        raise CheckpointError(f"The checkpoint {path} could not be {verb} by {who}: {text}.") from None
    except PipeError:
        raise
    except (RuntimeError, OSError) as error:
        raise transport.error(operation, error, timed_out="timed out" in str(error).lower()) from None
