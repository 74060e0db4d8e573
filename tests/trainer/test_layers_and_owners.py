"""What a layer sets in the LightningModule, or in another layer, is what one device sets, or an error names it."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CutError
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

WIDTH, SAMPLES, BATCH = 3, 16, 4
DATA = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).double()


class Sets(nn.Module):
    """Sets a number of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.of: list[Any] = []
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        for other in self.of:
            other.count += 1
        return torch.tanh(self.linear(x))


class Owner(L.LightningModule):
    """Gives a layer a reference to itself or to another layer, of which it knows nothing.

    Args:
        layer: the layer.
        of: the other one; ``None``: the LightningModule.
    """

    def __init__(self, layer: int, of: int | None) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Sets() for _ in range(4)))
        self.count = 0
        self.layers[layer].of = [self if of is None else self.layers[of]]

    def step(self, x: Tensor) -> Tensor:
        return self.layers(x).mean() * (1 + 0.01 * self.count)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.step(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def found(process: int, devices: int | None, layer: int, of: int | None, *, trains: bool, **options: Any) -> list[Any]:
    """What is evaluated, perhaps after a training, and what has been counted."""
    quiet()
    L.seed_everything(7, verbose=False)
    module = Owner(layer, of).double()
    parts = options.setdefault("micro_batches", 1)

    def trainer(**settings: Any) -> L.Trainer:
        strategy: Any = PipeStrategy(layers="layers", **options) if devices else "auto"
        settings = {**QUIET, **settings, "max_epochs": 1}
        return L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, **settings)

    if trains:
        accumulated = 1 if devices else parts
        fits = trainer(limit_val_batches=0, accumulate_grad_batches=accumulated)
        fits.fit(module, DataLoader(TensorDataset(DATA), BATCH // accumulated))
    evaluates = trainer()
    evaluates.validate(module, DataLoader(TensorDataset(DATA), BATCH), verbose=False)
    return [float(evaluates.callback_metrics["value"]), module.count]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    ("layer", "of", "place"), [(0, None, "count"), (0, 3, "layers.3.count"), (3, 0, "layers.0.count")]
)
def test_what_a_layer_sets_in_another_module_is_refused(layer: int, of: int | None, place: str, trains: bool) -> None:
    with pytest.raises(Exception, match=rf"'layers\.{layer}' changes `self\.{place}` in its forward pass"):
        run_trainers(found, 2, timeout=40, devices=2, layer=layer, of=of, trains=trains, micro_batches=2)


def test_with_several_stages_on_a_rank_it_is_refused() -> None:
    with pytest.raises(CutError, match=r"'layers\.0' changes `self\.count` in its forward pass"):
        found(0, 1, 0, None, trains=True, stages=2, micro_batches=2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"recompute": "always"}], ids=str)
def test_what_the_last_stage_sets_in_the_lightning_module_equals_one_device(options: dict[str, Any]) -> None:
    plain = found(0, None, 3, None, trains=True, **options | {"recompute": "never"})
    for values in run_trainers(found, 2, timeout=40, devices=2, layer=3, of=None, trains=True, **options):
        assert values == pytest.approx(plain, rel=1e-9)
