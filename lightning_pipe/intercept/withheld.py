"""Tensors of the batch that were not sent to this rank, because nothing here has read such a one so far.

The rank that loads knows of every other rank which tensors its runs of the step read (`BatchReads`). It sends these,
and a stand-in for each of the others::

    the batch       sent to the first stage    to a stage between    to the last stage
    images          images                     stand-in              stand-in
    labels          stand-in                   stand-in              labels

Code outside layers may ask a stand-in for its shape and dtype, and may call torch functions that need no more: their
results are stand-ins too. Whatever needs the value raises, in layers as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.placeholder import Placeholder, shape_only
from lightning_pipe.intercept.tensor_state import counting
from lightning_pipe.intercept.torch_functions import FLAT
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.torch_internals import disabled_torch_function, tree_leaves, tree_map

WHOLE_BATCHES = (
    "Read the same tensors of every batch of one structure, or let all ranks have all of them: "
    "PipeStrategy(whole_batches=True)."
)

_SHAPED = frozenset("_to_copy alias cat clone detach slice split split_with_sizes to".split())  # noqa: SIM905
"""Operations that bring a batch to a device, cut it and join it: of a stand-in they make another one."""


class Withheld(Tensor):
    """Stands for a tensor of the batch that this rank does not have.

    Attributes:
        place: where it is in the batch.
    """

    place: str = ""

    def __new__(cls, spec: TensorSpec, place: str, device: torch.device | str = "cpu") -> Withheld:
        """Stand for a tensor with this specification."""
        make = Tensor._make_wrapper_subclass
        with counting():  # views of a tensor of inference mode could not be made
            withheld: Withheld = make(
                cls, spec.shape, strides=spec.strides, dtype=spec.dtype, device=torch.device(device)
            )
        withheld.place = place
        return withheld

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer what reaches the stand-in past the tracker: outside steps, and inside layers."""
        name = str(func._schema.name).removeprefix("aten::")
        if name not in _SHAPED:
            raise read_too_late((args, kwargs), name)
        names = [argument.name for argument in func._schema.arguments]
        return _shapes(func, args[:1], {**dict(zip(names[1:], args[1:], strict=False)), **(kwargs or {})})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Withheld({self.place}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Withheld:
        return Withheld(TensorSpec.of(self), self.place, self.device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Withheld, (TensorSpec.of(self), self.place)  # arrives where batches are loaded: in host memory


FLAT.add(Withheld)


def without_values(name: str, func: Callable[..., Any], args: Any, kwargs: Any, *, pure: bool) -> Any:
    """What a function outside layers returns of stand-ins, as stand-ins.

    Args:
        name: of the function.
        func: the function.
        args: its arguments.
        kwargs: its keywords.
        pure: whether it changes and draws nothing, and does not concern the graph.

    Raises:
        CutError: it needs a value.
    """
    try:
        result = _shapes(func, args, kwargs) if pure else None
    except CutError:
        result = None
    leaves = tree_leaves(result)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise read_too_late((args, kwargs), name) from None
    return result


def _shapes(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    place = next(leaf.place for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Withheld))
    result = shape_only(func, args, kwargs)
    return tree_map(
        lambda leaf: Withheld(TensorSpec.of(leaf), place, leaf.device) if isinstance(leaf, Placeholder) else leaf,
        result,
    )


def read_too_late(arguments: Any, name: str) -> CutError:
    """The error of something that needs the value of a stand-in among its arguments."""
    found = next(leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Withheld))
    return CutError(
        f"'{name}' needs {found.place}, which was not sent to this rank: in the first batch of this structure "
        "nothing here read it.",
        hint=WHOLE_BATCHES,
    )
