"""Makes norms of gradients those of the whole model, in every hook."""

from __future__ import annotations

import functools
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities import grads
from torch import Tensor, nn
from torch.nn.utils import get_total_norm as _norm_here

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CommunicationError, ConfigurationError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.patches import replaced
from lightning_pipe.torch_internals import DisableTorchFunction

_grad_norm_here = grads.grad_norm
_ON_ALL = (
    "Every rank has the gradients of its own stages: ask for norms, and clip, on all ranks, not under "
    "`if trainer.is_global_zero` or in a rank_zero_only function; what comes out may be logged or printed on one."
)


@contextmanager
def over_all_stages(pipeline: Pipeline) -> Iterator[None]:
    """Let the functions that compute norms of gradients see all stages inside, each parameter once.

    These are ``torch.nn.utils.get_total_norm`` and with it ``clip_grad_norm_`` (which Lightning uses as well), and
    ``lightning.pytorch.utilities.grad_norm``. Outside steps all ranks of a pipeline must call them. Without a flush the
    ranks have gradients of different batches: torch's functions give this rank's norm, Lightning's is refused.

    Args:
        pipeline: knows who counts which parameter.
    """
    if len(pipeline.pipeline_members) == 1 and not pipeline.reductions.scattered:
        yield
        return
    with ExitStack() as changed:
        if pipeline.asynchronous is None:
            total = _total_norm(pipeline)
            for name in ("get_total_norm", "_get_total_norm"):
                changed.enter_context(_everywhere(name, _norm_here, total))
        changed.enter_context(_everywhere("grad_norm", _grad_norm_here, _grad_norm(pipeline)))
        yield


@contextmanager
def _everywhere(name: str, function: Callable[..., Any], other: Callable[..., Any]) -> Iterator[None]:
    """Put another function in the place of one, in all modules that have imported it under its name."""
    with ExitStack() as changed:
        for module in list(sys.modules.values()):
            if vars(module).get(name) is function:
                changed.enter_context(replaced(module, name, other))
        yield


def _total_norm(pipeline: Pipeline) -> Callable[..., Tensor]:
    @functools.wraps(_norm_here)
    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if pipeline.in_step:  # in a step, of which each rank runs another part
            return _norm_here(given, norm_type, error_if_nonfinite, foreach)
        _check_not_divided(pipeline)
        with DisableTorchFunction():  # what looks at the optimizer's step is to see one result for all ranks
            total = _of_all(pipeline, given, float(norm_type), foreach)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(f"The total norm of order {norm_type} of the gradients is {float(total)}.")
        return total

    return get_total_norm


@torch.no_grad()
def _of_all(pipeline: Pipeline, given: list[Tensor], order: float, foreach: bool | None) -> Tensor:
    """The norm of what all ranks give, of each parameter or gradient once. Collective over the pipeline."""
    present = [tensor for tensor in given if not isinstance(tensor, AbsentTensor) and tensor.numel()]
    known = _owned(pipeline)
    of_model = [(tensor, known[tensor.data_ptr()]) for tensor in present if tensor.data_ptr() in known]
    counted = [tensor for tensor, mine in of_model if mine]
    local = _norm_here(counted, order, foreach=foreach) if counted else torch.zeros(())
    power = local.double() if math.isinf(order) else local.double() ** order
    of_all = pipeline.reductions.members_with_all
    found = _gather(pipeline, f"the norm of order {order:g}", (float(power), len(present) - len(of_model)), of_all)
    if any(others for _, others in found):
        return _of_others(pipeline, given, order, foreach)
    powers = torch.tensor([power for power, _ in found], dtype=torch.float64)
    total = powers.max() if math.isinf(order) else powers.sum() ** (1 / order)
    # in the precision of the gradients, as on one device; filled there, which holds nobody
    dtype = given[0].dtype if given else torch.get_default_dtype()
    return torch.full((), float(total.to(dtype)), dtype=dtype, device=pipeline.transport.device)


def _gather(pipeline: Pipeline, what: str, mine: Any, members: tuple[int, ...]) -> list[Any]:
    """The values of all members, if all of them ask for the same norm.

    The name of the norm is sent along: torch would join a question of one rank with the next question of another rank.
    """
    try:
        found = pipeline.transport.all_gather_object((what, mine), members)
    except CommunicationError as error:
        raise CommunicationError(
            f"This rank asks for {what} of gradients at {_place()}, as all must: {error.message}",
            hint=error.hint and _ON_ALL,
        ) from error
    if not all(isinstance(each, tuple) and len(each) == 2 and each[0] == what for each in found):
        raise ConfigurationError(
            f"This rank asks for {what} of gradients at {_place()}, and other ranks ask for something else.",
            hint=_ON_ALL,
        )
    return [value for _, value in found]


def _place() -> str:
    """The line of the user's code that asks."""
    others = (
        *(str(Path(module.__file__ or "").parent) for module in (torch, lightning)),
        str(Path(__file__).parents[2]),
    )
    stack = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(others)]
    return f"{stack[-1].filename}:{stack[-1].lineno}"


def _of_others(pipeline: Pipeline, given: list[Tensor], order: float, foreach: bool | None) -> Tensor:
    """The norm of tensors that do not belong to the model, if all ranks have the same."""
    local = _norm_here(given, order, foreach=foreach)
    found = _gather(pipeline, f"the norm of order {order:g} of other tensors", float(local), pipeline.pipeline_members)
    if len(set(found)) > 1:
        raise ConfigurationError(
            "The ranks of the pipeline ask for norms of tensors that are neither parameters nor gradients of the model "
            f"and have {', '.join(f'{norm:.4g}' for norm in found)}: each sees its own part.",
            hint="Norms of gradients and of parameters are those of the whole model; join others yourself.",
        )
    return local


def _owned(pipeline: Pipeline) -> dict[int, bool]:
    """By address, the parameters and gradients here, and whether this rank is the one that counts them."""
    owned: dict[int, bool] = {}
    for name, parameter in pipeline.module.named_parameters():
        if pipeline.holds(name):
            mine = pipeline.reductions.counts(parameter, first=pipeline.ownership.counted(name))
            owned[parameter.data_ptr()] = mine
            if parameter.grad is not None:
                owned[parameter.grad.data_ptr()] = mine
    return owned


def _grad_norm(pipeline: Pipeline) -> Callable[..., dict[str, Any]]:
    @functools.wraps(_grad_norm_here)
    def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Any]:
        if pipeline.asynchronous is not None:
            raise ConfigurationError(
                f"Without a flush ({pipeline.family.name!r}) the ranks have gradients of different batches: there is "
                "no norm of all.",
                hint="Use torch.nn.utils.get_total_norm, which gives the norm of this rank's stages, or a schedule "
                "with a flush.",
            )
        _check_not_divided(pipeline)
        order = float(norm_type)
        if order <= 0:
            return _grad_norm_here(module, norm_type, group_separator)
        here = {
            name: parameter.grad.data.norm(order).cpu()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None and not isinstance(parameter.grad, AbsentTensor)
        }
        gathered = _gather(pipeline, f"the norms of order {order:g}", here, pipeline.reductions.members_with_all)
        found = {name: norm for norms in gathered for name, norm in norms.items()}
        device = pipeline.transport.device
        names = [name for name, _ in module.named_parameters() if name in found]
        norms = {f"grad_{order}_norm{group_separator}{name}": found[name].to(device) for name in names}
        if norms:
            norms[f"grad_{order}_norm_total"] = torch.tensor(list(norms.values())).norm(order)
        return norms

    return grad_norm


def _check_not_divided(pipeline: Pipeline) -> None:
    if pipeline.gradients_divided:
        raise ConfigurationError(
            "With shard_optimizer=True no rank has all gradients of its parameters any more once they are clipped.",
            hint="Ask for norms in on_before_optimizer_step or configure_gradient_clipping.",
        )
