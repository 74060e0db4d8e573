"""A checkpoint as a folder that all ranks write, in the layout of Lightning's strategies.

The module's state and the optimizers' go through ``torch.distributed.checkpoint``, under ``model``, ``optimizer_0`` and
so on, with the names of parameters in the place of their numbers. Everything else is in ``meta.pt`` beside them.
``FSDPStrategy`` has the module's state under ``model``, ``ModelParallelStrategy`` under ``state_dict``.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from lightning_pipe.errors import CheckpointError, PipeError
from lightning_pipe.patches import unheard
from lightning_pipe.trainer.checkpoints import file
from lightning_pipe.transport.base import Transport

REST = "meta.pt"
_COMPLETE = ".metadata"
"""The file that torch writes last."""
MODEL, MODEL_PARALLEL = "model", "state_dict"
"""Where the module's state is: where ranks have whole parameters, and where several divide each."""


def is_folder(path: str) -> bool:
    """Whether the path is such a checkpoint, or an incomplete one."""
    return os.path.isdir(path) and any(
        name in (REST, _COMPLETE) or name.endswith(".distcp") for name in os.listdir(path)
    )


def save(path: str, shards: dict[str, Any], rest: dict[str, Any] | None, transport: Transport, writer: int) -> None:
    """Write a folder. Collective over the world.

    Args:
        path: the folder; one that is there is replaced.
        shards: what this rank owns of the states of module and optimizers; nothing on replicas beside the first.
        rest: all other parts of the checkpoint, on the process that writes them.
        transport: this process's transport.
        writer: that process.
    """
    members = transport.topology.everyone
    with file.atomic_write(path, folder=True) if rest is not None else nullcontext("") as made:
        unfinished = transport.broadcast_object(made, writer, members)
        if rest is not None:
            torch.save(rest, os.path.join(unfinished, REST))
        with _naming_errors(transport, path), unheard(".*torch.distributed is disabled.*"):
            save_shards(shards, checkpoint_id=unfinished, no_dist=not (dist.is_available() and dist.is_initialized()))
    transport.barrier()


def load(path: str, holds: Callable[[str], bool], weights_only: bool | None) -> dict[str, Any]:
    """Read what this rank needs of a folder.

    Args:
        path: the folder.
        holds: whether this rank needs what has the name of a parameter or buffer.
        weights_only: as for ``torch.load``, of what is not a part of module and optimizers.

    Returns:
        The checkpoint, as one file would have it but for the names of parameters in the states of optimizers. Tensors
        that are not needed are on the meta device.

    Raises:
        CheckpointError: the folder is not complete, or is none of Lightning's.
    """
    missing = [name for name in (REST, _COMPLETE) if not os.path.isfile(os.path.join(path, name))]
    if missing:
        raise CheckpointError(
            f"The folder {path} is no complete checkpoint: it has no {' and no '.join(missing)}.",
            hint="The run that wrote it ended before it was done. Resume from another checkpoint.",
        )
    rest: dict[str, Any] = file.read(os.path.join(path, REST), weights_only)
    try:
        states = _states(path, holds)
    except (CheckpointException, pickle.UnpicklingError, RuntimeError, OSError, EOFError, LookupError) as error:
        raise CheckpointError(
            f"The folder {path} cannot be read: {_reason(error)}.", hint="Resume from another checkpoint."
        ) from None
    key = next((key for key in (MODEL, MODEL_PARALLEL) if key in states), None)
    if key is None:
        raise CheckpointError(f"The folder {path} is none of Lightning's: it has no {MODEL!r}, but {list(states)}.")
    states.update(rest)  # which has the optimizers that keep nothing of any parameter
    checkpoint = {"state_dict": states.pop(key), "optimizer_states": []}
    while (key := optimizer_key(len(checkpoint["optimizer_states"]))) in states:
        checkpoint["optimizer_states"].append(states.pop(key))
    return {**checkpoint, **states}


def optimizer_key(number: int) -> str:
    """Where a folder has the state of an optimizer."""
    return f"optimizer_{number}"


def _states(path: str, holds: Callable[[str], bool]) -> dict[str, Any]:
    """The states of module and optimizers."""
    metadata = FileSystemReader(path).read_metadata()
    flat: dict[str, Any] = dict.fromkeys(metadata.state_dict_metadata)
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            device = "cpu" if holds(_name(metadata.planner_data[key])) else "meta"
            flat[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
    here = {key: value for key, value in flat.items() if value is None or not value.is_meta}
    with unheard(".*torch.distributed is disabled.*"):
        load_shards(here, checkpoint_id=path, no_dist=True)
    return dcp._nested_dict.unflatten_state_dict({**flat, **here}, metadata.planner_data)


def _name(path: tuple[Any, ...]) -> str:
    """The parameter or buffer of a tensor at a path: it is behind ``model``, or ``optimizer_0`` and ``state``."""
    at = 1 if path[0] in (MODEL, MODEL_PARALLEL) else 2
    return str(path[at]) if len(path) > at else ""


def _reason(error: BaseException) -> str:
    """Why something could not be read or written."""
    cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    return f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"


@contextmanager
def _naming_errors(transport: Transport, path: str) -> Iterator[None]:
    """Name the checkpoint and the rank that failed in errors; torch's collectives do not know the failure board."""
    try:
        yield
    except CheckpointException as error:  # derives from BaseException, and has one text for all ranks (torch 2.13)
        who = transport.describe(next(iter(error.failures)))
        raise CheckpointError(f"The checkpoint {path} could not be written by {who}: {_reason(error)}.") from None
    except PipeError:
        raise
    except (RuntimeError, OSError) as error:
        operation = f"wait until the checkpoint {path} was written by all"
        raise transport.error(operation, error) from None
