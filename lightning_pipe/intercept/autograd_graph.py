"""Walks the graph that autograd has made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

Edge = tuple[Any, int]
"""A node and the number of one of its results; the node is ``None`` for what has no graph."""


def edge_of(tensor: Tensor | GradientEdge) -> Edge:
    """Where the graph behind a tensor begins."""
    return tensor[:2] if isinstance(tensor, GradientEdge) else (tensor.grad_fn, tensor.output_nr)


def nodes_behind(tensors: Iterable[Tensor | GradientEdge], without: Edge = (None, 0)) -> Iterator[Any]:
    """The nodes of the graph behind some tensors, other than those to which ``without`` alone leads."""
    seen: set[Any] = set()
    pending = [edge_of(tensor) for tensor in tensors]
    while pending:
        edge = pending.pop()
        node = edge[0]
        if node is not None and node not in seen and edge != without:
            seen.add(node)
            yield node
            pending += node.next_functions
