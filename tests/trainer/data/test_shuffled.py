"""The order of shuffled data: one device's where steps draw nothing, the same whatever they draw."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
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


def train(
    process: int,
    devices: int | None,
    folder: str,
    dropout: float = 0.0,
    generator: bool = False,
    resumed: str | None = None,
) -> Orders:
    """The order of the data in each epoch. Writes a checkpoint every two steps."""
    quiet()
    L.seed_everything(7, verbose=False)
    model = Model(dropout, generator).double()
    strategy: Any = PipeStrategy(layers="layers", micro_batches=2, compare_losses=False) if devices else "auto"
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    options = {**QUIET, "enable_checkpointing": True, "max_epochs": EPOCHS, "val_check_interval": 2}
    trainer = L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, callbacks=[saving], **options)
    trainer.fit(model, ckpt_path=None if resumed is None else f"{folder}/{resumed}.ckpt")
    return model.orders


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Orders]:
    """Orders that two ranks agree on."""
    runs: dict[str, dict[str, Any]] = {
        "draws nothing": {},
        "resumed": {"resumed": f"step={STEPS + 1}"},
        "generator": {"dropout": 0.5, "generator": True},
        "draws": {"dropout": 0.5},
    }
    folder = str(tmp_path_factory.mktemp("saved"))
    ranks = in_turn({name: partial(train, devices=2, folder=folder, **options) for name, options in runs.items()}, 2)
    for orders, other in ranks.values():
        assert orders == other
    return {name: of_ranks[0] for name, of_ranks in ranks.items()}


def test_the_order_is_that_of_one_device_where_steps_draw_nothing(found: dict[str, Orders], tmp_path: Path) -> None:
    plain = train(0, None, str(tmp_path))
    assert found["draws nothing"] == plain
    assert len({str(order) for order in plain.values()}) == EPOCHS
    resumed = train(0, None, str(tmp_path), resumed=f"step={STEPS + 1}")
    assert found["resumed"] == resumed
    assert [*resumed] == [1, 2], "it began again"


def test_a_generator_of_its_own_gives_the_order_of_one_device_where_steps_draw(
    found: dict[str, Orders], tmp_path: Path
) -> None:
    assert found["generator"] == train(0, None, str(tmp_path), dropout=0.5, generator=True)


def test_the_order_does_not_depend_on_what_steps_draw(found: dict[str, Orders], tmp_path: Path) -> None:
    assert found["draws"] == train(0, 1, str(tmp_path), dropout=0.5) == found["draws nothing"]
