"""Frees parameters in place, and lets go of what refers to them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.construction import Deferred, memory_key
from lightning_pipe.errors import PartitionError
from lightning_pipe.intercept.absent_tensor import AbsentTensor, exchange, is_absent
from lightning_pipe.local_parts import is_divided


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def check_memory(module: nn.Module) -> None:
    """Refuse a parameter of which another tensor of the module has some of the memory: a change of one is lost.

    Raises:
        PartitionError: names both.
    """
    found: dict[Any, dict[int, tuple[str, Tensor]]] = {}
    for name, tensor in (*named_tensors(module), *_attributes(module)):
        found.setdefault(_span(tensor)[0], {}).setdefault(id(tensor), (name, tensor))
    found.pop(0, None)
    for (one, first), (other, second) in chain.from_iterable(combinations(each.values(), 2) for each in found.values()):
        trained = isinstance(first, nn.Parameter) or isinstance(second, nn.Parameter)
        if trained and share_memory(first, second):
            raise PartitionError(
                f"'{one}' and '{other}' are different tensors with memory in common. Ranks, and processes that "
                "divide parameters, have memory of their own: a change of one would not be one of the other.",
                hint="Tie parameters as one object (self.head.weight = self.embed.weight), take a view where it is "
                "used, in a forward, and keep a copy of what is not to change: .detach().clone().",
            )


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may have memory in common."""
    (memory, start, end), (same, begin, stop) = _span(one), _span(other)
    return memory == same != 0 and start < stop and begin < end


def _span(tensor: Tensor) -> tuple[Any, int, int]:
    """The memory that a tensor has a part in, and from where to where its part may reach."""
    if tensor.layout is not torch.strided or is_absent(tensor) or not tensor.numel():
        return 0, 0, 0
    size, start = tensor.element_size(), int(tensor.storage_offset()) * tensor.element_size()
    reach: int = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return memory_key(tensor), start, start + (reach + 1) * size


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are neither parameters nor buffers; ``torch.nn.utils`` makes those with an original when used."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and f"{name}_orig" not in part._parameters:
                yield f"{path}.{name}".lstrip("."), value


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


def make_swappable(module: nn.Module) -> None:
    """Let go of what refers to parameters and buffers: tensors that others refer to cannot be swapped (torch 2.13).

    Recurrent layers refer to their weights weakly, and attributes with a graph to parameters: ``torch.nn.utils`` keeps
    one for ``weight_norm`` from the start, and makes a new one before each use.
    """
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            # without them a layer does not look whether its weights are still the same objects; they are
            part._flat_weight_refs = [None] * len(part._flat_weight_refs)
        for name, value in vars(part).items():
            if type(value) in (Tensor, Deferred) and value.grad_fn is not None:
                vars(part)[name] = value.detach()
