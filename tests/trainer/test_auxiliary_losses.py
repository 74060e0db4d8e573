"""A loss over what layers keep of a whole batch; the state contract has losses that they keep of each micro-batch."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import ConfigurationError
from tests.support.trainer_runs import QUIET, quiet

WIDTH = 3


class Router(nn.Module):
    """Sends each row to one of two experts; keeps what the balancing loss is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.logits: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.logits = 8 * self.gate(x)
        shares = self.logits.softmax(-1)
        out: Tensor = x + sum(shares[:, [i]] * expert(x) for i, expert in enumerate(self.experts))
        return out


class Balancing(L.LightningModule):
    """Adds the loss of equations (4) to (6) of Switch Transformers, over all rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers, self.losses = nn.Sequential(*(Router() for _ in range(3)), nn.Linear(WIDTH, 1)), list[float]()

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(x).pow(2).mean()
        for router in self.layers[:3]:
            chosen = nn.functional.one_hot(router.logits.argmax(-1), 2).double().mean(0)
            loss = loss + 2 * (chosen * router.logits.softmax(-1).mean(0)).sum()
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def balanced(strategy: Any) -> list[float]:
    """The losses of a training on one process."""
    model = Balancing().double()
    data = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, **QUIET).fit(model, DataLoader(data, 8))
    return model.losses


def test_a_loss_over_the_routing_of_the_whole_batch_runs_whole_or_is_told() -> None:
    quiet()
    one = balanced("auto")
    with pytest.warns(UserWarning, match="not a mean over the samples.*So batches run whole"):
        assert balanced(PipeStrategy(layers="layers", stages=2)) == pytest.approx(one, rel=1e-12)
    with pytest.raises(ConfigurationError, match=r"(?s)not a mean over the samples.*needs micro_batches=1"):
        balanced(PipeStrategy(layers="layers", stages=2, micro_batches=4))
    as_they_are = PipeStrategy(layers="layers", stages=2, micro_batches=4, compare_losses=False)
    assert balanced(as_they_are) != pytest.approx(one, rel=1e-2)
    assert balanced(PipeStrategy(layers="layers", stages=2, micro_batches=1)) == pytest.approx(one, rel=1e-12)
