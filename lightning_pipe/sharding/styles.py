"""Styles by the names that plans of Transformers have for them: torch's own, and modules that compute with parts.

Torch's `ColwiseParallel` and `RowwiseParallel` divide linear layers and embeddings. Experts index their parameters in
ways that DTensor does not follow, and a norm of heads sees those of its tensor rank alone: their forwards get the parts
as plain tensors, and what is a sum over tensor ranks is added around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, placement_types
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.torch_internals import tree_map

EXPERTS, NORM = "moe_tp_experts", "replicated_with_grad_allreduce"
"""Styles of modules that compute with parts: a part of each expert, and whole parameters on a part of the heads."""

_STYLES: Mapping[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    **dict.fromkeys(("colwise_rep", "colwise_gather_output"), ColwiseParallel(output_layouts=Replicate())),
    **dict.fromkeys(
        ("rowwise_rep", "rowwise_split_input", "embedding_rowwise"), RowwiseParallel(input_layouts=Replicate())
    ),
}
"""Torch's styles by the names that plans of Transformers have for them."""
# gate and up lie in one parameter, one behind the other: each rank has a part of both
_PACKED = placement_types._StridedShard(1, split_factor=2)
_OF_EXPERTS: Mapping[str | None, Placement] = {"colwise": Shard(1), "packed_colwise": _PACKED, "rowwise": Shard(2)}
"""How the parameters of experts are divided, whose last two dimensions are rows and columns."""


def apply_style(name: str, part: nn.Module, mesh: Any, style_of: Callable[[str], str | None]) -> None:
    """Divide a module as a plan says.

    Args:
        name: of the module.
        part: the module.
        mesh: of the tensor ranks.
        style_of: the style of a module or parameter.

    Raises:
        ConfigurationError: the style is not supported, or the plan does not say how a parameter of experts is divided.
    """
    style = style_of(name)
    own = {key: style_of(f"{name}.{key}") for key, _ in part.named_parameters(recurse=False)}
    known = _OF_EXPERTS if style == EXPERTS else (None,)  # of experts a plan names the parameters
    if style not in (None, EXPERTS, NORM, *_STYLES) or any(each not in known for each in own.values()):
        raise ConfigurationError(
            f"The model's plan for tensor parallelism divides '{name}' by the style {style!r} and its parameters by "
            f"{own}, which is not supported.",
            hint="Say how each layer is divided: PipeStrategy(parallelize=lambda layer, mesh: "
            "parallelize_module(layer, mesh, …)).",
        )
    if style == EXPERTS:
        _compute_with_parts(part, mesh, {key: _OF_EXPERTS[each] for key, each in own.items()}, summed=True)
    elif style == NORM:
        _compute_with_parts(part, mesh, dict.fromkeys(own, Replicate()), summed=False)
    elif style is not None:
        parallelize_module(part, mesh, _STYLES[style])


def _compute_with_parts(part: nn.Module, mesh: Any, placements: Mapping[str, Placement], *, summed: bool) -> None:
    """Divide the parameters of a module, and give its forward the parts.

    Args:
        part: the module.
        mesh: of the tensor ranks.
        placements: how its own parameters are divided.
        summed: whether its inputs are whole and its results parts of a sum; otherwise both are this rank's own.
    """
    for name, placement in placements.items():
        whole = part.get_parameter(name)
        divided = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
        part.register_parameter(name, nn.Parameter(divided, requires_grad=whole.requires_grad))
    forward = part.forward

    @wraps(forward)
    def with_parts(*args: Any, **kwargs: Any) -> Any:
        if summed:
            args, kwargs = tree_map(lambda leaf: _copied(leaf, mesh), (args, kwargs))
        with _parts(part):
            result = forward(*args, **kwargs)
        return tree_map(lambda leaf: _summed(leaf, mesh), result) if summed else result

    part.forward = with_parts


def _copied(leaf: Any, mesh: Any) -> Any:
    """What every rank has whole; its gradient is the sum of those of all ranks."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    return DTensor.from_local(leaf, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def _summed(leaf: Any, mesh: Any) -> Any:
    """The sum of what each rank has; each gets its whole gradient."""
    if not isinstance(leaf, Tensor):
        return leaf
    partial = DTensor.from_local(leaf, mesh, [Partial()], run_check=False)
    return partial.redistribute(placements=[Replicate()]).to_local()


@contextmanager
def _parts(part: nn.Module) -> Iterator[None]:
    """The parameters of a module are plain tensors inside: this rank's parts."""
    own: dict[str, Any] = part._parameters
    divided = {name: each for name, each in own.items() if isinstance(each, DTensor)}
    for name, each in divided.items():
        whole = all(placement.is_replicate() for placement in each.placements)
        own[name] = each.to_local(grad_placements=[Partial()] if whole else None)
    try:
        yield
    finally:
        own.update(divided)
