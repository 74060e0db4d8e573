"""What torch says about its operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.construction.tape import SMALL
from lightning_pipe.torch_internals import tree_leaves

UNPREDICTABLE = (NotImplementedError, RuntimeError, TypeError)
"""What operators raise on the meta device whose outcome depends on values."""


_RUNNING = ("running_mean", "running_var")
"""What batch norms write to. Schemas do not say so (``native_batch_norm``, ``cudnn_batch_norm`` in torch 2.13)."""


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in _RUNNING or (argument.alias_info is not None and argument.alias_info.is_write):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def device_of(kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> torch.device:
    """Where an operation runs."""
    given = kwargs.get("device")
    if given is not None:
        return torch.device(given)
    return next((tensor.device for tensor in tensors if tensor.ndim), torch.device("cpu"))


def recordable(
    func: Any, kwargs: Mapping[str, Any], tensors: Sequence[Tensor], others: Sequence[Tensor], *, building: bool
) -> bool:
    """Whether an operation can be carried out later.

    Args:
        func: the operator.
        kwargs: its keyword arguments.
        tensors: what it takes.
        others: those of them that have memory.
        building: whether a module is being built.
    """
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
        return False
    if any(tensor.layout is not torch.strided for tensor in tensors) or device_of(kwargs, tensors).type == "meta":
        return False
    if any(tensor.is_meta for tensor in tensors) and (
        kwargs.get("device") is None or func.overloadpacket is torch.ops.aten._to_copy
    ):  # one like it on another device needs no value
        return False
    if len(others) == len(tensors):
        return sum(tensor.nbytes for tensor in others if not tensor.is_meta) <= SMALL
    # outside a construction a module is filled (by load_state_dict) or converted; anything else wants values
    return building or not others or func.overloadpacket is torch.ops.aten.copy_


def settled(func: Any, kwargs: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The arguments of an operator that makes a tensor: defaults in force now must not matter when it runs later."""
    settings = {argument.name for argument in func._schema.arguments}
    made = dict(kwargs)
    if "dtype" in settings and made.get("dtype") is None:
        made["dtype"] = dtype
    if "device" in settings:
        made["device"] = device
    return made
