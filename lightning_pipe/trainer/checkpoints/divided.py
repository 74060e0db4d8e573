"""Lightning checkpoints of a divided module: gathered from the ranks, and divided over them again."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_pipe.construction import place_meta, read_out, unread
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CheckpointError
from lightning_pipe.local_parts import whole
from lightning_pipe.parameters.loading import load_held
from lightning_pipe.parameters.releasing import named_tensors
from lightning_pipe.text import memory
from lightning_pipe.trainer.at_rest import GATHER_LIMIT, size_of
from lightning_pipe.trainer.checkpoints import file, folder
from lightning_pipe.trainer.checkpoints.entries import (
    Owners,
    check_known,
    divided_as,
    gather,
    plain_name,
    replace_tensors,
    state_entries,
)
from lightning_pipe.transport.base import Transport

Location = str | Path
_SHARDED = ("state_dict", "optimizer_states")


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of one LightningModule.

    Args:
        module: the LightningModule.
        pipeline: the module over the ranks; ``None`` before and after a run, when every rank has all of it.
        transport: this process's transport.
        holders: after a run, the ranks that had the values: the copies that callbacks keep are still divided.
    """

    module: pl.LightningModule
    pipeline: Pipeline | None
    transport: Transport
    holders: Mapping[str, tuple[int, ...]]

    @property
    def _writer(self) -> int:
        # process 0 writes, as it does with Lightning's own strategies
        return self.transport.topology.locate(0)[1]

    # ------------------------------------------------------------------ saving

    def save_file(self, checkpoint: dict[str, Any], path: Location, io: CheckpointIO, storage_options: Any) -> None:
        """Write one ordinary file. Collective over the first pipeline, and over those that divide parameters.

        Args:
            checkpoint: as this process has dumped it.
            path: the file.
            io: the Trainer's plugin, which gets all of it on the process that writes.
            storage_options: for the plugin.
        """
        checkpoint = replace_tensors(checkpoint, whole)
        if self.transport.replica != 0 or self.transport.topology.tensor_rank != 0:
            return
        if self.transport.topology.ranks > 1 and (size := size_of(self.module)) >= GATHER_LIMIT:
            rank_zero_warn(
                f"An ordinary checkpoint of {type(self.module).__name__} is whole in rank 0's memory: {memory(size)}, "
                "and what optimizers keep of it. PipeStrategy(save_distributed_checkpoint=True) lets each rank write "
                "its share."
            )
        gathered = gather(checkpoint, self._owners(checkpoint), self.transport)
        if gathered is None:
            return
        with file.atomic_write(os.fspath(path)) if file.is_ours(path, io) else nullcontext(path) as place:
            io.save_checkpoint(gathered, place, storage_options=storage_options)

    def save_folder(self, checkpoint: dict[str, Any], path: Location, optimizers: Sequence[Optimizer]) -> None:
        """Write a folder. Collective over the world; replicas beside the first have nothing to add."""
        transport = self.transport
        shards: dict[str, Any] = {}
        rest: dict[str, Any] | None = None
        checkpoint = replace_tensors(checkpoint, whole)
        if transport.replica == 0 and transport.topology.tensor_rank == 0:
            owners = self._owners(checkpoint)
            rest = gather({key: value for key, value in checkpoint.items() if key not in _SHARDED}, owners, transport)
            state = checkpoint["state_dict"].items()
            own = {key: value for key, value in state if owners.of_tensor(key, value) == transport.rank}
            check_known(own)
            divided = self.pipeline is not None and self.pipeline.reductions.sharded is not None
            shards[folder.MODEL_PARALLEL if divided else folder.MODEL] = own
            for number, shard in enumerate(self._optimizer_shards(checkpoint, owners, optimizers)):
                # torch.distributed.checkpoint loses empty dictionaries, as of optimizers that keep nothing
                place = shards if owners.have_states(number) else rest
                if place is not None:
                    place[folder.optimizer_key(number)] = shard
        writer = transport.topology.tensor_slices[0].process(0, self._writer)
        folder.save(os.fspath(path), shards, rest, transport, writer)

    def _optimizer_shards(
        self, checkpoint: dict[str, Any], owners: Owners, optimizers: Sequence[Optimizer]
    ) -> Iterator[dict[str, Any]]:
        """What this rank owns of the states of optimizers, with the names of parameters in the place of numbers."""
        for number, (state, known) in enumerate(
            zip(checkpoint.get("optimizer_states", []), self._parameter_names(optimizers), strict=False)
        ):
            names = {index: name or str(index) for index, name in enumerate(known)}
            kept = {
                names.get(index, index): value
                for index, value in state["state"].items()
                if owners.of_state(number, index) == self.transport.rank
            }
            groups = [
                {**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]
            ]
            yield {**state, "state": kept, "param_groups": groups}

    def _owners(self, checkpoint: dict[str, Any]) -> Owners:
        if self.pipeline is not None:
            self.pipeline.check_values()
        transport = self.transport
        members = tuple(sorted(transport.peers))
        gathered = dict(zip(members, transport.all_gather_object(state_entries(checkpoint), members), strict=True))
        states = [gathered[process] for process in transport.peers]
        return Owners(self.module, self._holding, states, self._writer)

    def _holding(self, name: str) -> tuple[int, ...]:
        """The ranks that have the true value of a parameter or buffer."""
        if self.pipeline is not None:
            return self.pipeline.owners(name)
        return self.holders.get(name, tuple(range(self.transport.topology.ranks)))

    def _parameter_names(self, optimizers: Sequence[Optimizer]) -> list[list[str | None]]:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return [
            [names.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]
            for optimizer in optimizers
        ]

    # ------------------------------------------------------------------ loading

    def load(self, path: Location, io: CheckpointIO, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint; a file on a local disk is mapped into memory, so that only what is used is read.

        Raises:
            CheckpointError: there is something else, or a part of a checkpoint.
        """
        place = file.complete_path(os.fspath(path)) if file.is_local(path) else os.fspath(path)
        if folder.is_folder(place):
            names = {name for name, _ in named_tensors(self.module)}
            return folder.load(place, lambda key: self._holds(plain_name(key, names)), weights_only)
        if not file.is_ours(path, io) or not os.path.exists(place):
            return io.load_checkpoint(path, weights_only=weights_only)
        checkpoint = file.read(place, weights_only)
        if not isinstance(checkpoint, Mapping) or "state_dict" not in checkpoint:
            what = f"the keys {list(checkpoint)[:5]}" if isinstance(checkpoint, Mapping) else type(checkpoint).__name__
            raise CheckpointError(f"{place} is no checkpoint of Lightning: it holds {what}, and no state_dict.")
        return checkpoint  # type: ignore[return-value]

    def load_module(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Load the parameters and buffers that this rank holds."""
        place_meta(self.module)  # what is on the meta device could take no values
        # each tensor is read when it is copied into the module, and let go at once: they lie in a mapped file
        state = unread(copy(checkpoint["state_dict"]))
        load_held(self.module, self._holds, state, strict=strict)

    def load_optimizers(self, checkpoint: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Load the states of the parameters that this rank holds."""
        of_optimizers = self._parameter_names(optimizers)
        for optimizer, state, names in zip(optimizers, checkpoint["optimizer_states"], of_optimizers, strict=False):
            # a file has the numbers of parameters, a folder has names: in the same order, as torch takes them
            keys = [key for group in state["param_groups"] for key in group["params"]]
            known = dict(zip(keys, names, strict=False))
            kept = {key: value for key, value in state["state"].items() if self._holds(known.get(key))}
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            by_key = dict(zip(keys, parameters, strict=False))
            # cloned: they must not hang on the file, which may be replaced
            own = {key: divided_as(replace_tensors(value, read_out), by_key.get(key)) for key, value in kept.items()}
            optimizer.load_state_dict({**state, "state": own})

    def _holds(self, name: str | None) -> bool:
        return name is None or self.pipeline is None or self.pipeline.holds(name)
