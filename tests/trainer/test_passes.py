"""A loss of several passes that compares samples; `test_several_depths` and `test_any_module` train with passes."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import ConfigurationError
from tests.support.trainer_runs import QUIET


class Contrastive(L.LightningModule):
    """The two views of a sample are to be nearer to each other than to those of other samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        one, other = (F.normalize(self.layers(view), dim=1) for view in (batch, batch + 0.1))
        return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"schedule": "gpipe", "recompute": "always"}], ids=str)
def test_a_loss_that_compares_samples_is_told(options: dict[str, Any]) -> None:
    strategy = PipeStrategy(passes=2, stages=2, micro_batches=2, layers="layers", **options)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **QUIET)
    with pytest.raises(ConfigurationError, match=r"The loss is not a mean over the samples.* of 4 and 4 samples"):
        trainer.fit(Contrastive(), DataLoader(torch.randn(16, 4), batch_size=8))
