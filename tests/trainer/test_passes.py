"""Training steps of several passes under a Trainer."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy, simulate
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.schedules import Interleaved
from tests.support.processes import outcomes
from tests.support.trainer_runs import QUIET


class Siamese(L.LightningModule):
    """Two views of a sample in training; three in validation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        one, other = self.head(self.layers(x)), self.head(self.layers(x.flip(1)))
        loss = F.mse_loss(one, y) + F.mse_loss(one, other)
        self.log("train", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        views = [self.head(self.layers(x.roll(shift, 1))) for shift in range(3)]  # test-time augmentation
        self.log("val", F.mse_loss(torch.stack(views).mean(0), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Contrastive(Siamese):
    """The two views of a sample are to be nearer to each other than to those of other samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, other = (F.normalize(self.layers(view), dim=1) for view in (batch[0], batch[0] + 0.1))
        return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))


def fit(process: int, devices: int, plain: bool = False) -> dict[str, Any]:
    """What is logged, and the weights in the end."""
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    options: Any = {} if plain else {"strategy": PipeStrategy(passes=2, micro_batches=2, layers="layers")}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, max_epochs=1, enable_model_summary=False, **quiet, **options
    )
    module = Siamese()
    trainer.fit(module, DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = {name: value.tolist() for name, value in module.state_dict().items()}
    return {"logged": logged, "weights": weights}


def test_two_passes_log_and_learn_what_one_device_does() -> None:
    expected = fit(0, 1, plain=True)
    found = outcomes(fit, 2, timeout=60, devices=2)
    # the bubble of four stages on two ranks
    bubble = simulate(Interleaved(2).build(ranks=2, micro_batches=2)).bubble_ratio
    assert f"in 2 passes, predicted bubble {100 * float(bubble):.1f} %" in found[0].output
    for each in found:
        assert each.error is None, each.error
        assert each.value["logged"] == pytest.approx(expected["logged"], rel=1e-5)
        for name, value in expected["weights"].items():
            torch.testing.assert_close(torch.tensor(each.value["weights"][name]), torch.tensor(value))


@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"schedule": "gpipe", "recompute": "always"}], ids=str)
def test_a_loss_that_compares_samples_is_told(options: dict[str, Any]) -> None:
    strategy = PipeStrategy(passes=2, stages=2, micro_batches=2, layers="layers", **options)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, limit_val_batches=0, **QUIET)
    with pytest.raises(ConfigurationError, match=r"The loss is not a mean over the samples.* of 4 and 4 samples"):
        trainer.fit(Contrastive(), DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), batch_size=8))
