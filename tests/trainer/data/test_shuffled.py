"""The order of shuffled data: one device's where steps draw nothing, the same whatever they draw."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from tests.support.processes import in_turn
from tests.support.trainer_runs import QUIET, quiet

ROWS, BATCH, EPOCHS = 12, 4, 3
STEPS = ROWS // BATCH
Orders = dict[int, list[list[float]]]


class Model(L.LightningModule):
    """Notes the samples of each epoch's batches, in their order."""

    def __init__(self, dropout: float, generator: bool) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(2, 2), nn.Dropout(dropout)) for _ in range(4))
        self.layers = nn.Sequential(*blocks)
        self.generator = torch.Generator().manual_seed(3) if generator else None
        self.draws, self.orders = dropout > 0, Orders()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("value", self.layers(batch + (torch.randn_like(batch) if self.draws else 0)).mean())

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.orders.setdefault(self.current_epoch, []).append(batch[:, 0].tolist())

    def on_train_epoch_end(self) -> None:
        torch.randn(3)  # hooks draw from the global generator as on one device

    def train_dataloader(self) -> Any:
        return DataLoader(rows(), BATCH, shuffle=True, generator=self.generator)

    def val_dataloader(self) -> Any:
        return DataLoader(rows()[:BATCH], BATCH)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def rows() -> Any:
    return torch.arange(ROWS, dtype=torch.float64)[:, None].expand(-1, 2).contiguous()


def train(process: int, devices: int | None, dropout: float = 0.0, generator: bool = False) -> Orders:
    """The order of the data in each epoch."""
    quiet()
    L.seed_everything(7, verbose=False)
    model = Model(dropout, generator).double()
    strategy: Any = PipeStrategy(layers="layers", micro_batches=2, compare_losses=False) if devices else "auto"
    options = {**QUIET, "max_epochs": EPOCHS, "val_check_interval": 2}
    trainer = L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, **options)
    trainer.fit(model)
    return model.orders


@pytest.fixture(scope="module")
def found() -> dict[str, Orders]:
    """Orders that two ranks agree on."""
    runs: dict[str, dict[str, Any]] = {
        "draws nothing": {},
        "generator": {"dropout": 0.5, "generator": True},
        "draws": {"dropout": 0.5},
    }
    ranks = in_turn({name: partial(train, devices=2, **options) for name, options in runs.items()}, 2)
    for orders, other in ranks.values():
        assert orders == other
    return {name: of_ranks[0] for name, of_ranks in ranks.items()}


def test_the_order_is_that_of_one_device_where_steps_draw_nothing(found: dict[str, Orders]) -> None:
    plain = train(0, None)
    assert found["draws nothing"] == plain
    assert len({str(order) for order in plain.values()}) == EPOCHS


def test_a_generator_of_its_own_gives_the_order_of_one_device_where_steps_draw(found: dict[str, Orders]) -> None:
    assert found["generator"] == train(0, None, dropout=0.5, generator=True)


def test_the_order_does_not_depend_on_what_steps_draw(found: dict[str, Orders]) -> None:
    assert found["draws"] == train(0, 1, dropout=0.5) == found["draws nothing"]
