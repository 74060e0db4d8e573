"""A backward pass in two halves: the gradient of the input first, those of the weights when there is time.

The graph behind a stage's results falls into two parts: nodes that lead to the stage's input, and nodes that lead to
weights alone. The first half runs the former and keeps the gradients that arrive where the two parts meet; the second
half goes on from there. Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

Gradients = tuple[Tensor | None, ...]


@dataclass
class _Junction:
    """A node that leads to the input, and not by way of it to ``leaves``; with the gradients that arrived at it."""

    node: Node
    leaves: list[Node]
    gradients: Gradients | None = None


@dataclass
class SplitBackward:
    """The two halves of one backward pass.

    Args:
        results: what the stage computed, as far as it has gradients.
        gradients: their gradients.
        entry: the leaf through which the stage's input entered the graph; ``None`` on the first stage.
        whole: whether the pass cannot be divided: the first half does all of it.
    """

    results: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    entry: Tensor | None
    whole: bool
    _junctions: list[_Junction] = field(default_factory=list)
    _apart: list[bool] = field(default_factory=list)

    def input_half(self) -> None:
        """Run what the previous stage waits for."""
        if self.entry is None:
            return
        graph = _Graph.of([_node_of(result) for result in self.results], _node_of(self.entry))
        # A junction runs in both halves, and with it would the user's hooks.
        self.whole = self.whole or graph.indivisible or any(_has_hooks(junction.node) for junction in graph.junctions)
        if self.whole:
            torch.autograd.backward(self.results, self.gradients)
            return
        self._junctions = graph.junctions
        self._apart = [_node_of(result) not in graph.towards_entry for result in self.results]
        # nothing leads to the input: the second half does all
        if all(self._apart):
            return
        hooks = [junction.node.register_prehook(_keep(junction)) for junction in self._junctions]
        try:
            torch.autograd.backward(self.results, self.gradients, retain_graph=True, inputs=[self.entry])
        finally:
            for hook in hooks:
                hook.remove()

    def weight_half(self) -> None:
        """Add the gradients of the weights to ``parameter.grad``."""
        if self.entry is None:
            torch.autograd.backward(self.results, self.gradients)
            return
        if self.whole:
            return
        # Graphs may be walked several times here; what they hold goes when the whole pass is dropped.
        for result, gradient, apart in zip(self.results, self.gradients, self._apart, strict=True):
            if apart:
                torch.autograd.backward([result], [gradient], retain_graph=True)
        for junction in self._junctions:
            _finish(junction)
        self._junctions.clear()


@dataclass
class _Graph:
    """What a graph is made of, seen from its results."""

    junctions: list[_Junction]
    towards_entry: set[Node]
    indivisible: bool

    @classmethod
    def of(cls, roots: Sequence[Node], entry: Node) -> _Graph:
        """Walk the graph from ``roots``; ``entry`` is the node of the input."""
        order = _postorder(roots)
        leads: dict[Node, bool] = {}
        for node in order:
            leads[node] = node is entry or any(leads[after] for after, _ in node.next_functions if after is not None)
        junctions = []
        for node in order:
            apart = [after for after, _ in node.next_functions if after is not None and not leads[after]]
            if leads[node] and apart:
                leaves = [leaf for leaf in _postorder(apart) if not leaf.next_functions]
                junctions.append(_Junction(node, leaves))
        # A junction runs in both halves. The backward of a Function may do more than return gradients: once, then.
        indivisible = any(isinstance(junction.node, BackwardCFunction) for junction in junctions)
        # A reentrant checkpoint runs a backward pass of its own, which torch refuses in the first half (torch 2.13).
        indivisible = indivisible or any("CheckpointFunction" in node.name() for node in order)
        # Weights that two junctions lead to: asked for by name, autograd would go to them from one by way of the other.
        found = [leaf for junction in junctions for leaf in junction.leaves]
        indivisible = indivisible or len(found) > len(set(found))
        return cls(junctions, {node for node in order if leads[node]}, indivisible)


def _postorder(roots: Sequence[Node]) -> list[Node]:
    """All nodes, every one after those it leads to."""
    # Without recursion: a graph may be deeper than Python's stack of calls.
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((after, False) for after, _ in node.next_functions if after is not None)
    return order


def _has_hooks(node: Node) -> bool:
    """Whether the user has registered hooks on a node. All of one kind are in one dictionary, which a handle knows."""
    handles = node.register_prehook(lambda gradients: None), node.register_hook(lambda gradients, arrived: None)
    dictionaries = [handle.hooks_dict_ref() for handle in handles]
    for handle in handles:
        handle.remove()
    return any(dictionaries)


def _keep(junction: _Junction) -> Any:
    def hook(gradients: Gradients) -> None:
        junction.gradients = gradients

    return hook


def _finish(junction: _Junction) -> None:
    """Go on from a junction towards its weights, to which no other one leads: autograd computes nothing else."""
    if junction.gradients is None or all(gradient is None for gradient in junction.gradients):
        return
    # `AccumulateGrad` nodes alone have a variable
    weights = [node.variable for node in junction.leaves if hasattr(node, "variable")]
    if weights:
        edges = [GradientEdge(junction.node, i) for i, g in enumerate(junction.gradients) if g is not None]
        arrived = [gradient for gradient in junction.gradients if gradient is not None]
        torch.autograd.backward(edges, arrived, retain_graph=True, inputs=weights)


def _node_of(tensor: Tensor) -> Node:
    return torch.autograd.graph.get_gradient_edge(tensor).node
