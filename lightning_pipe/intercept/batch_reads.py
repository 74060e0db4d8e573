"""Learns which tensors of the batch the runs of the step on one rank read.

What code outside layers makes of the batch alone, every stage makes for itself, mostly to no purpose: a stage in the
middle flattens the images as the first one does. Such a function reads nothing as long as shapes and dtypes suffice to
know those of its result: the result stands for what it was made of, and counts as read when a layer, a function of what
comes from layers, or Python reads it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.placeholder import shape_only
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.torch_internals import tree_leaves

_tokens = itertools.count()


class BatchReads:
    """The tensors of a batch that one rank reads, over all its stages and micro-batches.

    Attributes:
        positions: among the leaves of the batch.
    """

    def __init__(self) -> None:
        self.positions: set[int] = set()
        # a tensor may outlive the batch as an attribute: the mark of an earlier batch does not count
        self._token = next(_tokens)

    def begin(self, leaves: Iterable[object]) -> None:
        """A run is about to begin, with this micro-batch."""
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._mark(leaf, frozenset([position]))
                if leaf.requires_grad:  # it counts as derived, of which nobody asks where it comes from
                    self.positions.add(position)

    def read(self, tensors: Iterable[object]) -> None:
        """Something needs the values of these, as far as they come from the batch."""
        for tensor in tensors:
            self.positions |= self._origins(tensor)

    def follow(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        tensors: Sequence[Tensor],
        result: Any,
        *,
        pure: bool,
    ) -> None:
        """A function of what does not come from layers has returned.

        Args:
            func: the function.
            args: its arguments.
            kwargs: its keywords.
            tensors: the tensors among them.
            result: what it returned.
            pure: whether it has changed and drawn nothing, and does not concern the graph.
        """
        origins = frozenset[int]().union(*map(self._origins, tensors))
        if not origins:
            return
        if pure and _known_by_shapes(func, args, kwargs, result):
            for leaf in tree_leaves(result):
                self._mark(leaf, origins)
        else:
            self.positions |= origins

    def _mark(self, tensor: Tensor, origins: frozenset[int]) -> None:
        tensor._pipe_origins = (self._token, origins)  # type: ignore[attr-defined]

    def _origins(self, tensor: object) -> frozenset[int]:
        """The positions of the leaves that a tensor was made of."""
        token, origins = getattr(tensor, "_pipe_origins", None) or (None, frozenset())
        return origins if token == self._token else frozenset()


def _known_by_shapes(func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> bool:
    """Whether the shapes and dtypes of the arguments tell those of the result, which is tensors alone."""
    leaves = tree_leaves(result)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        return False
    try:
        found = tree_leaves(shape_only(func, args, kwargs))
    except CutError:
        return False
    given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
    return len(found) == len(leaves) and all(
        isinstance(one, Tensor)
        and TensorSpec.of(one) == TensorSpec.of(other)
        and one.device == other.device
        and (one is other or (id(one) not in given and id(other) not in given))
        for one, other in zip(found, leaves, strict=True)
    )
