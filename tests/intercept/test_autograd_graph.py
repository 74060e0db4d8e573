"""The walk over autograd's graph."""

from __future__ import annotations

import torch

from lightning_pipe.intercept.incoming import edge_of, nodes_behind


def test_every_node_comes_once() -> None:
    leaf = torch.ones(2, requires_grad=True)
    doubled = leaf * 2
    total = (doubled + doubled).sum()
    names = [node.name() for node in nodes_behind([total, doubled])]
    assert sorted(names) == ["AddBackward0", "MulBackward0", "SumBackward0", "torch::autograd::AccumulateGrad"]


def test_an_edge_can_be_left_out() -> None:
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    doubled = leaf * 2
    total = doubled + other
    found = set(nodes_behind([total], without=edge_of(doubled)))
    assert doubled.grad_fn not in found
    assert len(found) == 2


def test_no_graph_has_no_nodes() -> None:
    assert list(nodes_behind([torch.ones(2)])) == []
