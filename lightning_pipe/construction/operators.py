"""What torch says about its operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.torch_internals import tree_leaves

UNPREDICTABLE = (NotImplementedError, RuntimeError, TypeError)
"""What operators raise on the meta device whose outcome depends on values."""


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def settled(func: Any, kwargs: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The arguments of an operator that makes a tensor: defaults in force now must not matter when it runs later."""
    settings = {argument.name for argument in func._schema.arguments}
    made = dict(kwargs)
    if "dtype" in settings and made.get("dtype") is None:
        made["dtype"] = dtype
    if "device" in settings:
        made["device"] = device
    return made
