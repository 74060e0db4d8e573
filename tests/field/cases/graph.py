"""Graphs: nodes of one graph, nodes of many, and whole graphs."""

from __future__ import annotations

import torch
import torch_geometric.nn as graph_nn
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from tests.field.wrapping import BATCH, STEPS, Case, Wrapped, label

WIDTH, CLASSES = 8, 3


def graph(nodes: int, each_node: bool = False, **more: Tensor) -> Data:
    """A random graph, with one label or one for each node."""
    edges = torch.randint(nodes, (2, 3 * nodes))
    target = label(CLASSES, nodes if each_node else 1)
    return Data(x=torch.randn(nodes, WIDTH), edge_index=edges, y=target, **more)


def graphs(each_node: bool = False) -> DataLoader:
    drawn = [graph(int(torch.randint(5, 12, ())), each_node) for _ in range(STEPS * BATCH)]
    return DataLoader(drawn, batch_size=BATCH)


def gcn_nodes() -> Case:
    """One graph with a mask, as Cora."""
    one = graph(60, each_node=True, train_mask=torch.rand(60) < 0.5)

    def loss(net: nn.Module, batch: Data) -> Tensor:
        out = net(batch.x, batch.edge_index)
        return nn.functional.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])

    return Case(Wrapped(graph_nn.GCN(WIDTH, 32, 3, CLASSES), loss), DataLoader([one] * STEPS, batch_size=1))


def gat_nodes() -> Case:
    """The nodes of many graphs, as PPI."""

    def loss(net: nn.Module, batch: Data) -> Tensor:
        return nn.functional.cross_entropy(net(batch.x, batch.edge_index), batch.y)

    return Case(Wrapped(graph_nn.GAT(WIDTH, 32, 3, CLASSES, heads=4), loss), graphs(each_node=True))


def gin_graphs() -> Case:
    """Whole graphs, as molecules of TUDataset."""
    net = graph_nn.Sequential(
        "x, edge_index, batch",
        [
            (graph_nn.GIN(WIDTH, 32, 3), "x, edge_index -> x"),
            (graph_nn.global_add_pool, "x, batch -> x"),
            graph_nn.MLP([32, 32, CLASSES], norm=None),
        ],
    )
    return Case(
        Wrapped(net, lambda net, one: nn.functional.cross_entropy(net(one.x, one.edge_index, one.batch), one.y)),
        graphs(),
    )


def graphgym() -> Case:
    from torch_geometric.graphgym.config import cfg, set_cfg
    from torch_geometric.graphgym.model_builder import GraphGymModule

    set_cfg(cfg)
    cfg.dataset.task = cfg.gnn.head = "graph"
    cfg.gnn.layers_mp, cfg.gnn.dim_inner = 3, 16
    cfg.optim.scheduler = "none"
    return Case(GraphGymModule(WIDTH, CLASSES, cfg), graphs())
