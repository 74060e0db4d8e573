"""What kinds of torch functions there are, as far as the tracker must know: by name, since torch has no other way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.torch_internals import tree_leaves

# ruff: noqa: SIM905  a table of names is easier to read as words than as a list of strings

METADATA = frozenset(
    """
    size dim stride numel nelement element_size storage_offset is_contiguous is_floating_point is_complex is_pinned
    ndimension get_device __len__ __hash__ __repr__ __str__ __format__ has_names is_same_size is_tensor is_storage
    result_type
    """.split()
) | frozenset(
    f"{name}.__get__"
    for name in """
    shape dtype device ndim layout requires_grad is_leaf grad_fn is_cuda is_cpu is_meta is_sparse is_quantized is_nested
    names itemsize nbytes output_nr _version _base retains_grad grad
    """.split()
)
"""Functions that look at a tensor without reading its value: they run as they are and are not recorded."""

AUTOGRAD = frozenset("requires_grad_ retain_grad register_hook".split())
"""Functions that concern the graph behind a tensor: a stage without the tensor has nothing to do."""

RANDOM = frozenset(
    """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout rrelu bernoulli bernoulli_
    multinomial normal normal_ poisson rand_like randn_like randint_like random_ uniform_ exponential_ geometric_
    log_normal_ cauchy_ scaled_dot_product_attention gumbel_softmax
    """.split()
)
"""Functions that draw random numbers."""

_SHAPED_BY_VALUES = frozenset(
    """
    masked_select nonzero argwhere unique unique_consecutive repeat_interleave bincount
    """.split()
)

_IN_PLACE = frozenset(
    """
    __setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__ __ixor__
    """.split()
)


_NORMS = frozenset("batch_norm instance_norm".split())
_EMBEDDINGS = frozenset("embedding embedding_bag".split())


def function_name(func: Any) -> str:
    """The name under which a torch function is recorded; property getters get their property's name."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"{getattr(func.__self__, '__name__', '')}.{name}"
    return str(name)


def changed_in_place(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a torch function changes in place, by torch's naming rule; statistics and norms besides."""
    found: Iterable[Any]
    if name in _NORMS:
        given = dict(zip(("input", "running_mean", "running_var"), args, strict=False)) | kwargs
        changes = given.get("training") or given.get("use_input_stats")  # of the one and the other, never left out here
        found = [given.get("running_mean"), given.get("running_var")] if changes else []
    elif name in _EMBEDDINGS:
        found = [] if kwargs.get("max_norm") is None else [kwargs.get("weight", args[1] if len(args) > 1 else None)]
    elif name in _IN_PLACE or name.endswith(".__set__") or (name.endswith("_") and not name.endswith("__")):
        found = args[0] if name.startswith("_foreach") else args[:1]
    elif (out := kwargs.get("out")) is None:
        return []
    else:
        found = out if isinstance(out, (tuple, list)) else [out]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def shaped_by_values(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the shape of the result depends on values: such a result is described to the stages without them."""
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in index)
    return name in _SHAPED_BY_VALUES or (name == "where" and len(args) == 1)


def typed_by_autocast(result: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether autocast may have chosen the type of new tensors, by their device: stages without them must be told."""
    device = tensors[0].device
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return False
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if any(leaf.device != device or any(leaf is tensor for tensor in tensors) for leaf in leaves):
        return False  # moved, or no new one
    types = [{tensor.dtype for tensor in each if tensor.is_floating_point()} for each in (leaves, tensors)]
    return any(one != other for one in types[0] for other in types[1])


def results_of(result: Any, written: Iterable[Tensor]) -> list[Tensor]:
    """The tensors a call leaves behind: its results and what it wrote to, each object once."""
    leaves = [result] if isinstance(result, Tensor) else [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    leaves += [tensor for tensor in written if all(tensor is not leaf for leaf in leaves)]
    return leaves


def unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each object once, in order."""
    return list({id(tensor): tensor for tensor in tensors}.values())


FLAT = {Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device}
"""Types that hold nothing else: most arguments are of one of them and need no search."""


def leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The leaves of a call's arguments."""
    leaves = [*args, *kwargs.values()]
    return leaves if FLAT.issuperset(map(type, leaves)) else tree_leaves((args, kwargs))
