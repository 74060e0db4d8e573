"""Molecules and single cells."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.field.wrapping import BATCH, STEPS, Case, Wrapped, quiet, single, typed

GENES, CELLS = 20, STEPS * BATCH


def _molecules(seed: int = 0) -> Any:
    """Chains of atoms with something to predict, as chemprop's data set."""
    import numpy
    from chemprop import data

    generator = numpy.random.default_rng(seed)
    chains = ["".join(generator.choice(["C", "O", "N", "C(C)"], 6)) for _ in range(STEPS * BATCH)]
    return data.MoleculeDataset([data.MoleculeDatapoint.from_smi(chain, generator.random(1)) for chain in chains])


@single
def chemprop_mpnn() -> Case:
    from chemprop import data, models
    from chemprop import nn as parts

    module = models.MPNN(parts.BondMessagePassing(d_h=32), parts.MeanAggregation(), parts.RegressionFFN(input_dim=32))
    return Case(module, data.build_dataloader(_molecules(), batch_size=BATCH, shuffle=False))


@single
def chemprop_multicomponent() -> Case:
    from chemprop import data, models
    from chemprop import nn as parts

    both = parts.MulticomponentMessagePassing([parts.BondMessagePassing(d_h=32) for _ in range(2)], n_components=2)
    module = models.MulticomponentMPNN(both, parts.NormAggregation(), parts.RegressionFFN(input_dim=64))
    pairs = data.MulticomponentDataset([_molecules(0), _molecules(1)])
    return Case(module, data.build_dataloader(pairs, batch_size=BATCH, shuffle=False))


def _cells() -> Any:
    """Counts of genes in cells of two batches and three types."""
    import anndata
    import numpy

    counts = torch.poisson(torch.rand(CELLS, GENES) * 5).float().numpy()
    cells = anndata.AnnData(counts)
    cells.obs["batch"] = numpy.array(["one", "two"])[torch.randint(2, (CELLS,)).numpy()]
    cells.obs["type"] = numpy.array(["a", "b", "unknown"])[torch.arange(CELLS).remainder(3).numpy()]
    return cells


def _loaded(loader: Any) -> Any:
    inner = loader.collate_fn
    loader.collate_fn = lambda drawn: typed(inner(drawn))
    return loader


def _without_noise(module: nn.Module) -> nn.Module:
    """The module with the means of its distributions in place of samples."""
    torch.distributions.Normal.rsample = lambda self, shape=(): self.loc.expand(*shape, *self.loc.shape)
    return quiet(module)


def scvi() -> Case:
    from scvi.dataloaders import AnnDataLoader
    from scvi.model import SCVI
    from scvi.train import TrainingPlan

    cells = _cells()
    SCVI.setup_anndata(cells, batch_key="batch")
    model = SCVI(cells, n_hidden=32, n_latent=4, n_layers=2)
    plan = TrainingPlan(_without_noise(model.module))
    return Case(plan, _loaded(AnnDataLoader(model.adata_manager, shuffle=False, batch_size=BATCH)))


def scanvi() -> Case:
    from scvi.dataloaders import AnnDataLoader
    from scvi.model import SCANVI
    from scvi.train import SemiSupervisedTrainingPlan

    cells = _cells()
    SCANVI.setup_anndata(cells, "type", "unknown", batch_key="batch")
    model = SCANVI(cells, n_hidden=32, n_latent=4, n_layers=2)
    plan = SemiSupervisedTrainingPlan(_without_noise(model.module), n_classes=2)
    return Case(plan, _loaded(AnnDataLoader(model.adata_manager, shuffle=False, batch_size=BATCH)))


@single
def peakvi() -> Case:
    from scvi.dataloaders import AnnDataLoader
    from scvi.model import PEAKVI
    from scvi.train import TrainingPlan

    cells = _cells()
    PEAKVI.setup_anndata(cells, batch_key="batch")
    model = PEAKVI(cells, n_hidden=32, n_latent=4)
    plan = TrainingPlan(_without_noise(model.module))
    return Case(plan, _loaded(AnnDataLoader(model.adata_manager, shuffle=False, batch_size=BATCH)))


def attentive_fp() -> Case:
    import torch_geometric.nn as graph_nn
    from torch_geometric.loader import DataLoader

    from tests.field.cases.graph import WIDTH, graph

    drawn = [graph(nodes, edge_attr=torch.randn(3 * nodes, 4)) for nodes in torch.randint(5, 12, (CELLS,)).tolist()]

    def loss(net: nn.Module, one: Any) -> Tensor:
        found = net(one.x, one.edge_index, one.edge_attr, one.batch)
        return nn.functional.mse_loss(found.squeeze(1), one.y.to(found.dtype))

    net = graph_nn.AttentiveFP(WIDTH, 32, 1, edge_dim=4, num_layers=3, num_timesteps=2)
    return Case(Wrapped(net, loss), DataLoader(drawn, batch_size=BATCH))
