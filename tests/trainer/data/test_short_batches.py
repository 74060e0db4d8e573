"""A short last batch is cut into fewer micro-batches where batch norm needs that, and the user hears of it once."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy
from lightning_pipe.config import micro_batch_sizes
from lightning_pipe.errors import ConfigurationError
from tests.support import oracle
from tests.support.pairs import slow_but
from tests.support.trainer_runs import QUIET


class Normalised(L.LightningModule):
    """Has batch norm behind its first layer, over rows or over images."""

    def __init__(self, images: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(8) if images else nn.BatchNorm1d(8)
        self.images, self.counts = images, []  # type: ignore[var-annotated]
        self.layers = nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 3)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.counts.append(len(x))
        if self.images:
            x = self.layers[0](x)[:, :, None, None].expand(-1, -1, 2, 3) + torch.arange(3.0, dtype=x.dtype)
            return F.cross_entropy(self.layers[3](self.layers[2](self.layers[1](x)).mean((2, 3))), y)
        return F.cross_entropy(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (samples,), generator=generator))


def fit(module: Normalised, samples: int, loader: Any = None, **options: Any) -> list[str]:
    """Two epochs of batches of 8; returns the warnings about batch norm."""
    options = {"stages": 2, "micro_batches": 4, **options}
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=PipeStrategy(**options), max_epochs=2, **QUIET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader or DataLoader(data(samples), batch_size=8))
    return [str(one.message) for one in caught if "batch norm" in str(one.message)]


@pytest.mark.feature("Data loaders", "short batches with batch norm", "differs", "fewer micro-batches, with a warning")
@pytest.mark.parametrize("schedule", slow_but(["1f1b", "zero_bubble", "pipedream_2bw"], "1f1b", "pipedream_2bw"))
def test_a_short_batch_is_cut_into_fewer(schedule: str) -> None:
    options = {"schedule": schedule, "deferred_batch_norm": schedule != "pipedream_2bw"}
    module, explicit = Normalised(), Normalised()
    told = fit(module, 21, **options)
    assert len(told) == 1
    assert "5 samples is cut into 2 micro-batches, not 4" in told[0]

    def by_hand(batch: Any, count: int) -> list[Any]:
        sizes = micro_batch_sizes(len(batch[0]), 4 if len(batch[0]) == 8 else 2)
        return list(zip(*(field.split(sizes) for field in batch), strict=True))

    assert fit(explicit, 21, split_batch=by_hand, **options) == []
    assert {
        name for name, value in explicit.state_dict().items() if not oracle.close(module.state_dict()[name], value)
    } == set()


def test_one_sample_each_is_left_to_whoever_asks_for_it() -> None:
    images = Normalised(images=True)
    asked = {"micro_batches": 8, "compare_losses": False}
    assert fit(images, 12, **asked) == []
    assert set(images.counts) == {1}
    ready = Normalised(images=True)
    batches = [[field[:8] for field in data(8).tensors], [field[:4] for field in data(8).tensors]]
    assert fit(ready, 0, oracle.loader(batches), **asked) == []
    assert set(ready.counts) == {1}
    with pytest.raises(ConfigurationError, match=r"(?s)more than one value.*drop_last=True"):
        fit(Normalised(), 8, **asked)


def test_frozen_norms_take_single_samples() -> None:
    module = Normalised()
    module.layers[1].eval()
    module.layers[1].train = lambda mode=True: module.layers[1]  # type: ignore[method-assign]
    assert fit(module, 21) == []
    assert 1 in module.counts
