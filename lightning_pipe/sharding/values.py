"""The first values of a divided module: of one layer or outside module after the other, the same on all holders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch import Tensor, nn

from lightning_pipe.construction import materialize
from lightning_pipe.local_parts import DATA, dimensions, is_divided, local
from lightning_pipe.parameters.ownership import Ownership
from lightning_pipe.parameters.releasing import make_swappable, named_tensors
from lightning_pipe.sharding.roots import Root, tied
from lightning_pipe.transport.base import Transport

T = TypeVar("T")


def give_values(
    module: nn.Module,
    layers: Sequence[tuple[str, nn.Module]],
    roots: Iterable[Root],
    ownership: Ownership,
    transport: Transport,
    divide: Callable[[Root], T] | None,
) -> list[T]:
    """Give all holders of a parameter or buffer the value of the first one of replica 0. Collective.

    What has no memory yet gets it: one layer or outside module after the other, so that a process has one of them
    whole, and of those before it what ``divide`` has left.

    Args:
        module: the user's module.
        layers: all layers with dotted names.
        roots: the layers of this rank, and the outside modules.
        ownership: who holds what.
        transport: this process's transport.
        divide: divides a layer or outside module, whose values are there, over further processes.

    Returns:
        What ``divide`` has returned for each.
    """
    if divide is not None:
        make_swappable(module)
    shared, known, found = tied(module, layers), set[str](), list[T]()
    for root in roots:
        materialize(root.module)
        named = {f"{root.name}.{name}": each for name, each in named_tensors(root.module) if each not in shared}
        _share(named.items(), ownership, transport)
        known |= named.keys()
        if divide is not None:
            found.append(divide(root))
    materialize(module)
    _share([(name, tensor) for name, tensor in named_tensors(module) if name not in known], ownership, transport)
    return found


def _share(tensors: Iterable[tuple[str, Tensor]], ownership: Ownership, transport: Transport) -> None:
    """Give all holders, and their tensor ranks, the value of the first one. Collective, in the same order."""
    topology = transport.topology
    for name, tensor in tensors:
        if not ownership.holds(name):
            continue
        owners = ownership.owners(name)
        members, replica = topology.holders(owners), 0
        if DATA in dimensions(tensor):  # each replica has a part of its own
            replica = transport.replica
            members = topology.members(replica, owners)
        groups = {members: topology.process(replica, owners[0])}
        if not is_divided(tensor):
            members = topology.tensor_processes(transport.process)
            groups[members] = members[0]
        for members, source in groups.items():
            if len(members) > 1:
                data = local(tensor.detach()).contiguous()
                transport.broadcast(data, source, members).wait()
                local(tensor.detach()).copy_(data)
