"""Lightning checkpoints of a divided module: gathered from the ranks, and divided over them again."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipe.construction import read_out
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CheckpointError
from lightning_pipe.lightning_internals import is_local_path
from lightning_pipe.parameters.loading import load_held
from lightning_pipe.parameters.ownership import named_tensors
from lightning_pipe.text import memory
from lightning_pipe.trainer.at_rest import GATHER_LIMIT
from lightning_pipe.trainer.checkpoints import file, folder
from lightning_pipe.trainer.checkpoints.rank_entries import (
    Owners,
    Path,
    Pending,
    RankEntries,
    assembled,
    check_known,
    plain_name,
    rank_entries,
    receive_items,
    receive_pieces,
    replace_tensors,
    send_items,
    send_tensors,
    state_entries,
)
from lightning_pipe.trainer.checkpoints.unfinished import found
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.objects import as_bytes

Location = str | FilePath


class Checkpoints:
    """Checkpoints of one LightningModule.

    Args:
        module: the LightningModule.
        pipeline: the module over the ranks; ``None`` before and after a run, when every rank has all of it.
        transport: this process's transport.
        holders: after a run, the ranks that had the values: the copies that callbacks keep are still divided.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        pipeline: Pipeline | None,
        transport: Transport,
        holders: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._module, self._pipeline, self._transport = module, pipeline, transport
        # process 0 writes, as it does with Lightning's own strategies
        self._writer = transport.topology.locate(0)[1]
        self._holders = holders

    @property
    def _writes(self) -> bool:
        return self._transport.replica == 0 and self._transport.rank == self._writer

    # ------------------------------------------------------------------ saving

    def save_file(self, checkpoint: dict[str, Any], path: Location, io: CheckpointIO, storage_options: Any) -> None:
        """Write one ordinary file. Collective over the first pipeline.

        Args:
            checkpoint: as this process has dumped it.
            path: the file.
            io: the Trainer's plugin; its own files on local disks are written tensor by tensor.
            storage_options: for the plugin.
        """
        transport = self._transport
        if transport.replica != 0:
            return
        mine = rank_entries(checkpoint, self._owners(checkpoint), transport.rank)
        if not self._writes:
            send_items(mine, transport, self._writer)
            send_tensors(mine, transport, self._writer)
            return
        others = [rank for rank in range(transport.topology.ranks) if rank != self._writer]
        items = [item for rank in others for item in receive_items(transport, rank)[0]]
        tree = assembled(checkpoint, items)
        check_known(tree)
        for states in tree.get("optimizer_states", []):
            if "state" in states:
                states["state"] = {index: states["state"][index] for index in sorted(states["state"])}
        if type(io) is TorchCheckpointIO and storage_options is None and is_local_path(path):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            file.write(os.fspath(path), tree, partial(receive_pieces, transport))
        else:
            self._say_what_it_costs(tree, path, io)
            io.save_checkpoint(self._in_memory(tree), path, storage_options=storage_options)

    def save_folder(self, checkpoint: dict[str, Any], path: Location, optimizers: Sequence[Optimizer]) -> None:
        """Write a folder. Collective over the world."""
        rank = self._transport.rank
        first = self._transport.replica == 0
        mine = rank_entries(checkpoint, self._owners(checkpoint), rank) if first else RankEntries(rank)
        names = self._parameter_names(optimizers)
        folder.save(os.fspath(path), checkpoint, mine, self._transport, self._writer, names)

    def _owners(self, checkpoint: dict[str, Any]) -> Owners:
        if self._pipeline is not None:
            self._pipeline.check_values()
        transport = self._transport
        members = tuple(sorted(transport.peers))
        gathered = dict(zip(members, transport.all_gather_object(state_entries(checkpoint), members), strict=True))
        states = [gathered[process] for process in transport.peers]
        return Owners(self._module, self._holding, states, self._writer)

    def _holding(self, name: str) -> tuple[int, ...]:
        """The ranks that have the true value of a parameter or buffer."""
        if self._pipeline is not None:
            return self._pipeline.owners(name)
        return self._holders.get(name, tuple(range(self._transport.topology.ranks)))

    def _parameter_names(self, optimizers: Sequence[Optimizer]) -> list[list[str | None]]:
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        return [
            [names.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]
            for optimizer in optimizers
        ]

    def _say_what_it_costs(self, tree: dict[str, Any], path: Location, io: CheckpointIO) -> None:
        pending: set[Pending] = set()
        replace_tensors(tree, pending.add, Pending)
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in pending)
        if size >= GATHER_LIMIT:
            rank_zero_warn(
                f"{type(io).__name__} takes {path} whole: {memory(size)} of other ranks come into rank 0's memory. "
                "Lightning's own TorchCheckpointIO writes a local file piece by piece; "
                "PipeStrategy(save_distributed_checkpoint=True) lets each rank write its share."
            )

    def _in_memory(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The whole checkpoint, for plugins that take nothing else."""
        arrived: dict[Any, Tensor] = {}

        def note(leaf: Pending) -> Pending:
            arrived.setdefault(leaf, torch.empty(0))
            return leaf

        replace_tensors(tree, note, Pending)
        for leaf in sorted(arrived, key=lambda pending: (pending.rank, pending.number)):
            arrived[leaf] = torch.empty(leaf.shape, dtype=leaf.dtype)
            rest = as_bytes(arrived[leaf])
            for part in receive_pieces(self._transport, leaf):
                rest[: len(part)] = part
                rest = rest[len(part) :]
        result: dict[str, Any] = replace_tensors(tree, arrived.__getitem__, Pending)
        return result

    # ------------------------------------------------------------------ loading

    def load(self, path: Location, io: CheckpointIO, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint; a file on a local disk is mapped into memory, so that only what is used is read.

        Raises:
            CheckpointError: there is something else, or a part of a checkpoint.
        """
        place = found(os.fspath(path)) if is_local_path(path) else os.fspath(path)
        if folder.is_folder(place):
            return folder.load(place, self._wanted, weights_only, self._transport)  # type: ignore[no-any-return]
        if type(io) is not TorchCheckpointIO or not is_local_path(path) or not os.path.exists(place):
            return io.load_checkpoint(path, weights_only=weights_only)
        checkpoint = file.read(place, weights_only)
        if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
            what = f"the keys {list(checkpoint)[:5]}" if isinstance(checkpoint, Mapping) else type(checkpoint).__name__
            raise CheckpointError(f"{place} is no checkpoint of Lightning: it holds {what}, and no state_dict.")
        return checkpoint  # type: ignore[return-value]

    def load_module(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load the parameters and buffers that this rank holds."""
        load_held(self._module, self._holds, checkpoint["state_dict"], strict=strict)

    def load_optimizers(self, checkpoint: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Load the states of the parameters that this rank holds."""
        names = self._parameter_names(optimizers)
        for optimizer, state, known in zip(optimizers, checkpoint["optimizer_states"], names, strict=False):
            kept = {i: s for i, s in state["state"].items() if not isinstance(i, int) or self._holds(known[i])}
            # cloned: they must not hang on the file, which may be replaced
            own = {i: replace_tensors(each, read_out) for i, each in kept.items()}
            optimizer.load_state_dict({**state, "state": own})

    def _holds(self, name: str | None) -> bool:
        return name is None or self._pipeline is None or self._pipeline.holds(name)

    def _wanted(self, path: Path, parameter_names: Sequence[Sequence[str | None]]) -> bool:
        """Whether this rank needs the tensor at a path of a checkpoint."""
        if path[0] == "optimizer_states":
            return self._holds(parameter_names[path[1]][path[3]])
        names = {name for name, _ in named_tensors(self._module)}
        name = plain_name(path[-1], names)
        return name is None or self._holds(name)
