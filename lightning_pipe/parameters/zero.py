"""Divides optimizer state over the processes that hold the same parameters: each updates its part and shares it.

Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.1 (stage 1). Where gradients are summed for their owners
alone (stage 2, section 5.2) `GradientSync` does so, by the owners that are found here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.work import Work

BUCKET_BYTES = 25 * 2**20
"""What is sent at once is neither very small nor all there is."""
_UNDER_WAY = 2
"""Buckets of updated values on their way at a time."""


class HolderGroup(NamedTuple):
    """Parameters that the same processes hold; ``first`` says which of these gets the first one."""

    members: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...]
    first: int = 0


class OptimizerShards:
    """Who updates which parameter.

    Between a backward pass and the optimizer's step `drop_gradients` takes away what other processes update: the
    optimizer passes by parameters without a gradient, and makes no state for them. After the step `share` brings every
    holder the new values.

    Args:
        groups: the parameters with several holders, in the same order on all of these.
        transport: reaches them.

    Attributes:
        groups: as given.
    """

    def __init__(self, groups: Iterable[HolderGroup], transport: Transport) -> None:
        self.groups = tuple(groups)
        self._transport = transport
        self._owner: dict[int, int] = {}
        for group in self.groups:
            first = group.first % len(group.members)
            load = dict.fromkeys(group.members[first:] + group.members[:first], 0)
            # Largest first, each to whoever has least: loads differ by the largest parameter at most. Frozen ones come
            # last: they have neither gradients nor state until they thaw. Sorting is stable, so all holders come to the
            # same division without a message.
            for parameter in sorted(group.parameters, key=lambda each: (not each.requires_grad, -each.numel())):
                member = min(load, key=lambda member: load[member])
                load[member] += parameter.numel()
                self._owner[id(parameter)] = member

    def owner(self, parameter: nn.Parameter) -> int:
        """The process that updates a parameter; this one if nobody else holds it."""
        return self._owner.get(id(parameter), self._transport.process)

    def mine(self, parameter: nn.Parameter) -> bool:
        """Whether this process updates a parameter."""
        return self.owner(parameter) == self._transport.process

    def _of_others(self) -> Iterator[nn.Parameter]:
        """The parameters that other processes update."""
        return (each for group in self.groups for each in group.parameters if not self.mine(each))

    def drop_gradients(self) -> None:
        """Take away the gradients of what other processes update."""
        for parameter in self._of_others():
            parameter.grad = None

    @torch.no_grad()
    def share(self) -> None:
        """Bring all holders the values that the owners have updated. Collective over each group."""
        # Issued in the same order on all holders, some before the first is waited for: a copy of all would take as much
        # memory again as the parameters do.
        under_way: deque[tuple[Work, Tensor, Sequence[nn.Parameter], int]] = deque()
        for group in self.groups:
            for member in group.members:
                updated = [parameter for parameter in group.parameters if self.owner(parameter) == member]
                for indices in buckets(updated):
                    parameters = [updated[index] for index in indices]
                    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
                    under_way.append((self._transport.broadcast(flat, member, group.members), flat, parameters, member))
                    if len(under_way) > _UNDER_WAY:
                        self._take(*under_way.popleft())
        for shared in under_way:
            self._take(*shared)

    def _take(self, work: Work, flat: Tensor, parameters: Sequence[nn.Parameter], member: int) -> None:
        """Take over the values that a member has updated."""
        work.wait()
        if member != self._transport.process:
            values = torch.split(flat, [parameter.numel() for parameter in parameters])
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value.view_as(parameter))

    def gather_states(self, optimizers: Sequence[Optimizer]) -> None:
        """Give every holder the optimizer state of its parameters. Collective; undone by `drop_states`."""
        for group in self.groups:
            for parameter in group.parameters:
                for optimizer in optimizers:
                    state = optimizer.state.get(parameter) if self.mine(parameter) else None
                    state = self._transport.broadcast_object(state, self.owner(parameter), group.members)
                    if state:
                        optimizer.state[parameter] = state

    def drop_states(self, optimizers: Sequence[Optimizer]) -> None:
        """Forget the optimizer state of what other processes update."""
        for parameter in self._of_others():
            for optimizer in optimizers:
                optimizer.state.pop(parameter, None)


def buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[int]]:
    """Indices of the parameters of each bucket: one dtype and device, in order, up to the bucket's size."""
    open_buckets: defaultdict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    sizes: defaultdict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
    for index, parameter in enumerate(parameters):
        kind = (parameter.dtype, parameter.device)
        open_buckets[kind].append(index)
        sizes[kind] += parameter.nbytes
        if sizes[kind] >= bucket_bytes:
            yield open_buckets.pop(kind)
            del sizes[kind]
    yield from open_buckets.values()
