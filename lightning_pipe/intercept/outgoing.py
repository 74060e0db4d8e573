"""What may surround a cut, what a tensor that leaves a stage must be, and how its path describes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import LiveTensor
from lightning_pipe.intercept.torch_patches.autograd_functions import check_not_hidden
from lightning_pipe.intercept.torch_patches.backward_hooks import check_not_divided
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.torch_internals import functorch_active

if TYPE_CHECKING:
    from lightning_pipe.intercept.stage_run import StageRun


def check_surroundings(run: StageRun, name: str, layer: nn.Module | None) -> None:
    """Raise if something surrounds layers on both sides of the cut before ``layer`` that cannot be cut."""
    unit, around, calls = run.whole_unit, run.checkpoint, len(run.tracker.calls)
    if unit is not None:
        unit.check_whole(run, name)
        calls = unit.calls
    elif run.training and run.unit is None:
        check_not_hidden(name)
    check_not_divided(run.hooked, name, layer)
    if around is not None and around.reentrant and around.begin < calls:
        raise CutError(
            f"the cut before layer '{name}' lies inside a checkpoint with use_reentrant=True, which computes without "
            "gradients at first: none would come back over the cut.",
            hint="Use use_reentrant=False, or one checkpoint for every layer.",
        )
    if functorch_active() or forward_ad._current_level >= 0:
        raise CutError(
            f"the cut before layer '{name}' lies inside a transform of torch.func (grad, jvp, vmap, ...) or inside "
            "forward-mode differentiation, of which nothing goes over a cut.",
            hint="Use them inside one layer, or one device.",
        )


def check_plain(tensor: Tensor, layer: str) -> None:
    """Raise if a tensor would come out of a message as something else."""
    if type(tensor) is not Tensor or tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested tensor" if tensor.is_nested else f"{type(tensor).__qualname__} with {tensor.layout}"
        raise CutError(
            f"a {kind} crosses the cut before layer '{layer}': only torch.Tensor with torch.strided travels.",
            hint="Use x.as_subclass(torch.Tensor) before the layers, x.to_dense() or a padded tensor with its lengths.",
        )


def entry_of(number: int, tensor: Tensor, shared: bool, lender: tuple[int, int] | None) -> LiveTensor:
    """The entry of a tensor in the path of the cut; see `LiveTensor`."""
    spec = TensorSpec.of(tensor)
    # A view made under no_grad says that it requires a gradient and has none to give (torch 2.13).
    detached = tensor._is_view() and tensor.grad_fn is None
    shared = shared or lender is not None or spec.overlaps
    return LiveTensor(number, spec, tensor.requires_grad and not detached, shared, lender)


def overlapping(tensors: Sequence[Tensor]) -> set[int]:
    """Those that share memory with another, by ``id``. To come out of one message is not to share memory."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors if len(tensors) > 1 else ():
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    found: set[int] = set()
    for together in by_storage.values():
        if len(together) == 1:
            continue
        reached, last = 0, 0
        for start, end, tensor_id in sorted((*_extent(tensor), id(tensor)) for tensor in together if tensor.numel()):
            if start < reached:
                found |= {last, tensor_id}
            if end > reached:
                reached, last = end, tensor_id
    return found


def _extent(tensor: Tensor) -> tuple[int, int]:
    """From where to where a tensor reaches in its storage, in bytes."""
    elements = 1 + sum((int(n) - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + elements * tensor.itemsize
