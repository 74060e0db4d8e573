"""Buffers of layers that forward passes change, kept equal on all processes that hold them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_pipe.pipeline.transport import Transport


class Drift:
    """Buffers other than those of deferred batch norm that layers change which several processes hold.

    Each of these sees samples of its own. After every batch all have the values of the first of them, as with
    ``DistributedDataParallel``. Which buffers these are shows in the first training batch.

    Args:
        module: the user's module.
        layers: dotted names of the layers.
        transport: reaches the other processes.
        members: ``members(name)``: the processes that hold a buffer, sorted.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[str],
        transport: Transport,
        members: Callable[[str], Sequence[int]],
    ) -> None:
        self._module, self._transport, self._members = module, transport, members
        self._layers = tuple(f"{name}." for name in layers)
        self._before: dict[str, Tensor] = {}
        self._changing: list[str] = []

    def begin(self) -> None:
        """Before the first batch."""
        self._before = {name: buffer.clone() for name, buffer in self._mine()}

    def agree(self, copies: Callable[[str], int]) -> None:
        """After it. Collective.

        Args:
            copies: ``copies(name)``: how many ranks of one pipeline hold a buffer.
        """
        now = dict(self._mine())
        changed = [name for name, copy in self._before.items() if name in now and not torch.equal(now[name], copy)]
        self._before = {}
        everyone = tuple(range(self._transport.topology.world_size))
        gathered = self._transport.all_gather_object(changed, everyone)
        self._changing = sorted({name for theirs in gathered for name in theirs})
        twins = [name for name in self._changing if copies(name) > 1]
        if twins and self._transport.process == self._members(twins[0])[0]:
            warnings.warn(
                f"'{twins[0]}' ({len(twins)} such buffers) changes in forward passes, and the schedule keeps copies of "
                "its layer on several ranks, each of which sees a part of the micro-batches: the copies are set to the "
                "values of the first one after every batch. On one device the buffer would see all micro-batches.",
                stacklevel=2,
            )

    def equalise(self) -> None:
        """After every batch. Collective over the holders of each buffer."""
        if not self._changing:
            return
        buffers = dict(self._module.named_buffers())
        for name in self._changing:
            members = tuple(self._members(name))
            if self._transport.process in members and len(members) > 1:
                data = buffers[name].detach().contiguous()
                self._transport.broadcast(data, members[0], members).wait()
                buffers[name].data.copy_(data)

    def _mine(self) -> list[tuple[str, Tensor]]:
        """The buffers of layers that this process shares with others."""
        return [
            (name, buffer)
            for name, buffer in self._module.named_buffers()
            if name.startswith(self._layers)
            and len(members := self._members(name)) > 1
            and self._transport.process in members
        ]
