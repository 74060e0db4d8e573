"""Frees parameters in place, and lets go of what refers to them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_pipe.construction import Deferred
from lightning_pipe.intercept.absent_tensor import AbsentTensor, exchange
from lightning_pipe.local_parts import is_divided


def release(module: nn.Module, tensor: Tensor, absent: AbsentTensor) -> None:
    """Let a parameter or buffer be an absent one; nothing refers to its values any more.

    Args:
        module: has it.
        tensor: the parameter or buffer.
        absent: stands for it.
    """
    tensor.grad = None
    if not is_divided(tensor):
        # The object stays, so that optimizers, ties and hooks that refer to it go on working.
        exchange(tensor, absent)
        return
    # The object of a DTensor cannot become another one (torch 2.13).
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter is tensor:
                part._parameters[name] = absent  # type: ignore[assignment]
        state: Any = part._get_fsdp_state() if hasattr(part, "_get_fsdp_state") else None  # type: ignore[operator]
        for group in () if state is None else state._fsdp_param_groups:
            for each in [own for own in group.fsdp_params if own.sharded_param is tensor]:
                group.fsdp_params.remove(each)  # it would look for its part, and does so when a state is loaded
                each._post_load_hook_handle.remove()


def drop_weak_references(module: nn.Module) -> None:
    """Recurrent layers refer to their weights weakly, and such tensors cannot be swapped (torch 2.13)."""
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            # without them a layer does not look whether its weights are still the same objects; they are
            part._flat_weight_refs = [None] * len(part._flat_weight_refs)


def drop_graphs(module: nn.Module) -> None:
    """Attributes with a graph refer to parameters, and such parameters cannot be swapped (torch 2.13).

    ``torch.nn.utils.weight_norm`` keeps one from the start; it makes a new one before each use.
    """
    for part in module.modules():
        for name, value in vars(part).items():
            if type(value) in (Tensor, Deferred) and value.grad_fn is not None:
                vars(part)[name] = value.detach()
