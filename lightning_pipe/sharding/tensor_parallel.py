"""Layers that several processes compute together: torch's tensor parallelism on the layers of a stage.

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3. The tensor ranks of a stage see the same micro-batches
and seeds. A layer takes and returns plain tensors; inside, torch's DTensor divides what the plan says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.errors import ConfigurationError, CutError
from lightning_pipe.intercept.absent_tensor import is_absent
from lightning_pipe.local_parts import TENSOR, dimensions, is_divided, local
from lightning_pipe.sharding.roots import Root
from lightning_pipe.sharding.styles import apply_style
from lightning_pipe.torch_internals import tree_leaves
from lightning_pipe.transport.base import Transport

_UNLIKE = 0.05
"""Of a norm: rounding makes no such difference, other values do."""

Parallelize = Callable[[nn.Module, Any], object]
"""Divides a layer, or a module outside the layers, over a mesh of one dimension."""

_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
"""By the end of a pattern in a plan: of what a tensor rank needs a whole number."""


def plan_of(module: nn.Module, size: int) -> dict[str, str]:
    """The plans of the models of Transformers in a module: styles by patterns of dotted names.

    Args:
        module: the user's module.
        size: tensor ranks.

    Raises:
        ConfigurationError: these do not divide the heads of an attention.
    """
    found: dict[str, str] = {}
    for name, part in module.named_modules():
        if not hasattr(part, "base_model"):
            continue
        config: Any = getattr(part, "config", None)
        of_base = getattr(config, "base_model_tp_plan", None) if part.base_model is part else None
        plan = {**(getattr(type(part), "_tp_plan", None) or {}), **(of_base or {})}
        for end, name_of_heads in _HEADS.items():
            heads = getattr(config, name_of_heads, None) or size
            if heads % size and any(pattern.endswith(end) for pattern in plan):
                raise ConfigurationError(
                    f"{type(part).__name__} has {name_of_heads}={heads}, which tensor_parallel_size={size} does "
                    "not divide evenly.",
                    hint="Use a tensor_parallel_size that divides it, or PipeStrategy(parallelize=…), which leaves "
                    "the attention whole.",
                )
        found.update({f"{name}.{pattern}".lstrip("."): style for pattern, style in plan.items()})
    return found


def styles_of(plan: Mapping[str, str]) -> Callable[[str], str | None]:
    """Tells the style of a module or parameter by its name; ``None``: the plan has none."""
    patterns = [(re.compile(re.escape(pattern).replace(r"\*", r"\d+")), style) for pattern, style in plan.items()]
    return lambda name: next((style for pattern, style in patterns if pattern.fullmatch(name)), None)


def divider(
    module: nn.Module, mesh: Any, parallelize: Parallelize | None, shared: set[Tensor]
) -> Callable[[Root], None]:
    """What divides a layer or outside module over tensor ranks, if there are several. Collective over these.

    Args:
        module: the user's module.
        mesh: of the tensor ranks.
        parallelize: the user's; ``None``: plans of Transformers say how.
        shared: tied weights, whose modules plans leave whole: one that is divided would be tied no more.

    Raises:
        ConfigurationError: nobody says how, or the plan is not supported or fails.
    """
    if (size := mesh.size()) == 1:
        return lambda root: None
    plan = plan_of(module, size) if parallelize is None else {}
    if parallelize is None and not plan:
        raise ConfigurationError(
            f"tensor_parallel_size={size}, and nothing says how {type(module).__name__} is divided: it holds no model "
            "of Transformers with a plan (base_model_tp_plan), and its configure_model divides nothing.",
            hint="Use PipeStrategy(parallelize=lambda layer, mesh: parallelize_module(layer, mesh, …)), or call "
            'parallelize_module(…, self.device_mesh["tensor_parallel"], …) in configure_model.',
        )
    style_of = styles_of(plan)

    def divide(root: Root) -> None:
        parts = list(root.module.named_modules(prefix=root.name))
        for name, part in parts if parallelize is not None else ():
            if any(map(is_divided, part.parameters(recurse=False))):
                raise ConfigurationError(
                    f"'{name}' belongs to several layers, and parallelize= has divided it with the first of them.",
                    hint="Let parallelize= leave it out: it stays whole on every tensor rank.",
                )
        try:
            for name, part in parts:
                if shared.isdisjoint(part.parameters()):
                    apply_style(name, part, mesh, style_of)
            if parallelize is not None:
                parallelize(root.module, mesh)
        except (RuntimeError, KeyError) as error:
            raise ConfigurationError(
                f"The plan of tensor parallelism fails for '{root.name}': {error}",
                hint="Leave out what torch does not divide, such as a weight that spectral_norm computes.",
            ) from error
        hooks_inside(root.name, root.module)

    return divide


def check_tied(before: Mapping[str, nn.Parameter], module: nn.Module) -> None:
    """Refuse a tied weight that is tied no more.

    Args:
        before: the parameters under all their names, before they were divided.
        module: the user's module.

    Raises:
        ConfigurationError: names it.
    """
    now, first = dict(module.named_parameters(remove_duplicate=False)), dict[nn.Parameter, str]()
    for name, parameter in before.items():
        other = first.setdefault(parameter, name)
        if now.get(other) is not now.get(name):
            raise ConfigurationError(
                f"'{other}' and '{name}' were one parameter, and one of them has been divided: they would be trained "
                "apart.",
                hint="Leave the modules with tied weights out of the plan: they stay whole on every tensor rank.",
            )


def check_even(root: Root, replicas: int) -> None:
    """Refuse a layer or outside module of which processes are to have parts of different sizes.

    Args:
        root: divided over tensor ranks.
        replicas: that are to divide the first dimension of each part once more; 1: none.

    Raises:
        ConfigurationError: names the parameter.
    """
    for name, parameter in root.module.named_parameters(prefix=root.name):
        if TENSOR in dimensions(parameter):
            part: Any = parameter
            (placement,) = part.placements
            dim, strips = placement.dim % part.ndim, getattr(placement, "split_factor", 1)
            size, count = part.shape[dim], part.device_mesh.size() * strips * (replicas if dim == 0 else 1)
            if size % count:
                raise ConfigurationError(
                    f"Dimension {dim} of '{name}' has {size} places, which {count} processes do not divide evenly "
                    f"({size} / {count} = {size / count:.2f}).",
                    hint="Use another tensor_parallel_size, or leave the module out of the plan.",
                )


@torch.no_grad()
def check_alike(module: nn.Module, transport: Transport) -> None:
    """Refuse gradients of whole parameters that tensor ranks do not have alike. Collective over these.

    Args:
        module: the user's module, behind the passes of a training batch.
        transport: this process's transport.

    Raises:
        ConfigurationError: each tensor rank would train a parameter of its own.
    """
    own = {}
    for name, each in module.named_parameters() if transport.topology.tensor > 1 else ():
        over = getattr(getattr(each, "device_mesh", None), "mesh_dim_names", ())
        if each.grad is not None and TENSOR not in over and not is_absent(each):
            gradient = local(each.grad).double()
            own[name] = float(gradient.sum()), float(gradient.norm())
    for theirs in transport.all_gather_object(own, transport.topology.tensor_processes(transport.process)):
        for name, (total, norm) in own.items():
            other = theirs.get(name, (math.inf, math.inf))
            if max(abs(other[0] - total), abs(other[1] - norm)) > _UNLIKE * norm:
                raise ConfigurationError(
                    f"Tensor ranks have different gradients of '{name}', which is whole on each of them: it sees a "
                    "part of the values on each.",
                    hint="Name its module in the plan: SequenceParallel() for a norm of a part of a sequence.",
                )


def hooks_inside(name: str, layer: nn.Module) -> None:
    """Let torch's hooks of tensor parallelism run within the forwards of a layer and its parts.

    Around the forward of a layer they would act on the step's side of its call, and would be taken for the user's.

    Args:
        name: of the layer.
        layer: the layer, or a module outside the layers.
    """
    for part in layer.modules():
        before, behind = list(_taken(part, "_forward_pre_hooks")), list(_taken(part, "_forward_hooks"))
        if before or behind or part is layer:
            part.forward = _with_hooks(part, before, behind, name if part is layer else None)


Hooks = Sequence[tuple[Callable[..., Any], bool]]


def _taken(part: nn.Module, table: str) -> Iterator[tuple[Callable[..., Any], bool]]:
    """Takes torch's hooks away from a module: each with whether it takes keyword arguments."""
    hooks, with_kwargs = vars(part)[table], vars(part)[f"{table}_with_kwargs"]
    for key, hook in list(hooks.items()):
        if str(getattr(hook, "__module__", "")).startswith("torch.distributed.tensor"):
            del hooks[key]
            yield hook, bool(with_kwargs.pop(key, False))


def _with_hooks(part: nn.Module, before: Hooks, behind: Hooks, name: str | None) -> Callable[..., Any]:
    """The forward of a module with its hooks; of a layer with a ``name`` the results are plain tensors."""
    forward = part.forward

    @wraps(forward)
    def parallel(*args: Any, **kwargs: Any) -> Any:
        for hook, with_kwargs in before:
            changed = hook(part, args, kwargs) if with_kwargs else hook(part, args)
            if changed is not None and with_kwargs:
                args, kwargs = changed
            elif changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        result = forward(*args, **kwargs)
        for hook, with_kwargs in behind:
            changed = hook(part, args, kwargs, result) if with_kwargs else hook(part, args, result)
            result = result if changed is None else changed
        if name is not None:
            _check_plain(name, result)
        return result

    return parallel


def _check_plain(name: str, result: Any) -> None:
    for leaf in tree_leaves(result):
        if is_divided(leaf):
            raise CutError(
                f"'{name}' returns a DTensor of shape {tuple(leaf.shape)} with placements {tuple(leaf.placements)}; "
                "what leaves a layer must be a plain tensor, for the code and the stages behind it.",
                hint="Let the last module of the layer return local tensors: RowwiseParallel() or "
                "ColwiseParallel(output_layouts=Replicate()), both with use_local_output=True.",
            )
