"""A backward pass in two halves: the gradient of the input first, those of the weights when there is time.

The graph behind a stage's results falls into two parts: nodes that lead to the stage's input, and nodes that lead to
weights alone. The first half runs the former and keeps the gradients that arrive where the two parts meet; the second
half goes on from there. Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from lightning_pipe.torch_internals import run_backward


def input_half(
    results: Sequence[Tensor], gradients: Sequence[Tensor], entry: Tensor | None, *, whole: bool
) -> Callable[[], None]:
    """Run what the previous stage waits for.

    Args:
        results: what the stage computed, as far as it has gradients.
        gradients: their gradients.
        entry: the leaf through which the stage's input entered the graph; ``None`` on the first stage.
        whole: whether the pass cannot be divided: this half does all of it.

    Returns:
        Runs the other half, which adds the gradients of the weights to ``parameter.grad``.
    """
    everything = partial(backward, results, gradients)
    if entry is None:
        return everything
    rest = None if whole else _divided(results, gradients, entry)
    if rest is None:
        everything()
        return lambda: None
    return rest


def _divided(results: Sequence[Tensor], gradients: Sequence[Tensor], entry: Tensor) -> Callable[[], None] | None:
    """Run the way to the entry alone. Returns what runs the rest; ``None`` if all has to be walked at once."""
    leads, junctions = _walk([_node_of(result) for result in results], _node_of(entry))
    if junctions is None:
        return None
    arrived: dict[Node, tuple[Tensor | None, ...]] = {}
    hooks = {node: node.register_prehook(partial(arrived.__setitem__, node)) for node in junctions}
    try:
        # A junction runs in both halves, and with it would the user's hooks.
        if any(map(_has_others, hooks, hooks.values())):
            return None
        apart = [not leads[_node_of(result)] for result in results]
        if not all(apart):  # else nothing leads to the input, and the second half does all
            backward(results, gradients, retain_graph=True, inputs=[entry])
    finally:
        for hook in hooks.values():
            hook.remove()

    def rest() -> None:
        # Graphs may be walked several times here; what they hold goes when the whole pass is dropped.
        if any(apart):
            backward([*compress(results, apart)], [*compress(gradients, apart)], retain_graph=True)
        for junction, of_junction in arrived.items():
            # on towards its weights, to which no other junction leads: autograd computes nothing else
            edges = {GradientEdge(junction, i): each for i, each in enumerate(of_junction) if each is not None}
            # `AccumulateGrad` nodes alone have a variable
            weights = [node.variable for node in junctions[junction] if hasattr(node, "variable")]
            if weights and edges:
                backward([*edges], [*edges.values()], retain_graph=True, inputs=weights)

    return rest


def _walk(roots: Sequence[Node], entry: Node) -> tuple[dict[Node, bool], dict[Node, list[Node]] | None]:
    """For each node of a graph whether it leads to the entry, and where the parts for the two halves meet.

    Args:
        roots: the nodes of its results.
        entry: the node of the stage's input.

    Returns:
        ``None`` in the place of the junctions if the graph has to be walked at once.
    """
    after: dict[Node, list[Node]] = {}
    leads: dict[Node, bool] = {}  # in the order in which it is known, after all that a node leads to
    # Without recursion: a graph may be deeper than Python's stack of calls.
    stack = [*roots]
    while stack:
        node = stack[-1]
        if node not in after:
            after[node] = [following for following, _ in node.next_functions if following is not None]
            stack += [following for following in after[node] if following not in after]
            continue
        stack.pop()
        if node not in leads:
            leads[node] = node is entry or True in [leads[following] for following in after[node]]
    junctions: dict[Node, list[Node]] = {}
    for node, leading in leads.items():
        apart = [following for following in after[node] if not leads[following]] if leading else []
        if apart:
            junctions[node] = _leaves(apart, after)
    # A junction runs in both halves. The backward of a Function may do more than return gradients: once, then.
    indivisible = any(isinstance(node, BackwardCFunction) for node in junctions)
    # A reentrant checkpoint runs a backward pass of its own, which torch refuses in the first half (torch 2.13).
    indivisible = indivisible or any("CheckpointFunction" in type(node).__name__ for node in leads)
    # Weights that two junctions lead to: asked for by name, autograd would go to them from one by way of the other. If
    # a result that does not lead to the entry does, what lies between would run once for each of the two.
    found = [leaf for leaves in junctions.values() for leaf in leaves]
    found += _leaves([root for root in roots if not leads[root]], after)
    return leads, None if indivisible or len(found) > len(set(found)) else junctions


def _leaves(nodes: Sequence[Node], after: Mapping[Node, Sequence[Node]]) -> list[Node]:
    """Where a graph ends, from some nodes on."""
    seen: dict[Node, None] = {}
    stack = [*nodes]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen[node] = None
            stack += after[node]
    return [node for node in seen if not after[node]]


def _has_others(junction: Node, hook: RemovableHandle) -> bool:
    """Whether the user has hooks beside ``hook``. All of one kind are in one dictionary, which a handle knows."""
    behind = junction.register_hook(lambda gradients, arrived: None)
    others = any(len(handle.hooks_dict_ref() or ()) > 1 for handle in (hook, behind))
    behind.remove()
    return others


def backward(
    results: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    *,
    retain_graph: bool = False,
    inputs: Sequence[Tensor] = (),
) -> None:
    """``torch.autograd.backward`` of what is known to fit: its checks take as long as a small layer's own pass."""
    arguments = tuple(results), tuple(gradients), retain_graph, False, tuple(inputs)
    run_backward(*arguments, allow_unreachable=True, accumulate_grad=True)


def _node_of(tensor: Tensor) -> Node:
    return torch.autograd.graph.get_gradient_edge(tensor).node
