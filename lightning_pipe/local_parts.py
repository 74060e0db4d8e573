"""What this process has of parameters and gradients that several processes divide: the local parts of torch's DTensors.

A plain tensor is its own local part, so that code for both kinds asks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DATA = "data_parallel"
"""The dimension of a mesh that has the replicas, as Lightning's ModelParallelStrategy names it."""
TENSOR = "tensor_parallel"
"""The dimension of a mesh whose ranks compute one layer together, named as there."""
PIPELINE = "pipeline_parallel"
"""The dimension of a mesh that has the ranks of a pipeline."""


def is_divided(tensor: object) -> bool:
    """Whether a tensor is a DTensor. By name: whether there is one is no reason to import torch's sharding."""
    return type(tensor).__name__ == "DTensor"


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has; it shares the memory.

    Example:
        >>> local(torch.ones(2))
        tensor([1., 1.])
    """
    part: Tensor = tensor.to_local() if is_divided(tensor) else tensor  # type: ignore[attr-defined]
    return part


@torch.no_grad()
def with_local(part: Tensor, like: Tensor) -> Tensor:
    """A tensor that is divided as another one is, with this local part."""
    if not is_divided(like):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def settled(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient that is divided as its parameter is: sums over tensor-parallel ranks that are pending are made."""
    if not is_divided(gradient) or not is_divided(parameter):
        return gradient
    wanted: Sequence[Any] = parameter.placements  # type: ignore[attr-defined]
    divided: DTensor = gradient  # type: ignore[assignment]
    with torch.no_grad():
        return divided if divided.placements == wanted else divided.redistribute(placements=wanted)


def divides(placement: Any) -> bool:
    """Whether a placement gives each process a part: FSDP's parts of parts are no ``Shard`` (torch 2.13)."""
    return not (placement.is_replicate() or placement.is_partial())


def dimensions(tensor: Tensor) -> frozenset[str]:
    """The dimensions of the mesh over which a tensor is divided; none for a plain tensor."""
    if not is_divided(tensor):
        return frozenset()
    names: Sequence[str] = tensor.device_mesh.mesh_dim_names or ()  # type: ignore[attr-defined]
    placements: Sequence[Any] = tensor.placements  # type: ignore[attr-defined]
    return frozenset(name for name, placement in zip(names, placements, strict=True) if divides(placement))


def pieces(tensor: Tensor, dimension: str) -> int:
    """Into how many pieces a dimension of the mesh divides a tensor."""
    if dimension not in dimensions(tensor):
        return 1
    size: int = tensor.device_mesh[dimension].size()  # type: ignore[attr-defined]
    return size


def share(whole: Tensor, like: Tensor) -> Tensor:
    """The local part of a whole value, for a process that has all of it.

    Args:
        whole: the value.
        like: divided as the value is to be.
    """
    if not is_divided(like):
        return whole
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    for number, placement in enumerate(placements):
        if divides(placement):
            at, count, mine = placement.dim, mesh.size(number), mesh.get_local_rank(number)
            # FSDP takes a part of each of the parts that tensor parallelism makes afterwards
            strips = torch.chunk(whole, getattr(placement, "split_factor", 1), at)
            # of fewer rows than parts the last parts are empty
            parts = [part for strip in strips for part in torch.chunk(strip, count, at)[mine : mine + 1]]
            whole = torch.cat([whole.narrow(at, 0, 0), *parts], at)
    return whole


def whole(tensor: Tensor) -> Tensor:
    """The whole value of a tensor. Collective over the processes that divide it."""
    return tensor.full_tensor() if is_divided(tensor) else tensor  # type: ignore[attr-defined]


def succeed(parameter: Tensor, former: Tensor) -> None:
    """Let a parameter that takes another one's place have its hooks, and what users have set on it."""
    vars(parameter).update(vars(former) | vars(parameter))
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        # the same dictionary: handles that were given out remove hooks from it
        if (hooks := getattr(former, name)) is not None:
            setattr(parameter, name, hooks)


def count_all_parts() -> None:
    """Let a number that is read of a DTensor (``.item()``, ``float``, ``if``) be that of the whole tensor.

    Where a sum over processes is pending, as in a norm, torch (2.13) gives each process the number of its own part.
    Collective over the processes that divide the tensor, as other operations on it are.
    """
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    read = torch.ops.aten._local_scalar_dense.default
    dispatcher._custom_op_handlers.setdefault(read, lambda read, args, _: read(whole(args[0])))
