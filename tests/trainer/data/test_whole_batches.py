"""Batches whose loss is no mean of parts run whole, and leave the traces that they leave on one device."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import ConfigurationError
from tests.support.pairs import slow_but
from tests.support.processes import outcomes, run_trainers
from tests.support.trainer_runs import QUIET

WIDTH = 4


class Counting(nn.Module):
    """A layer that counts its calls, in a buffer and in a list, and keeps how it routes its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.shapes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.shapes.append(len(x))
        x = self.linear(x)
        self.routes = x.softmax(-1)
        return torch.tanh(x)


class Contrastive(L.LightningModule):
    """Compares the samples of a batch, from its batch number ``late`` on, and leaves all kinds of traces.

    Adds a loss over the routing of the whole batch, as Switch Transformers do.
    """

    def __init__(self, late: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Counting() for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("average", torch.zeros(()))
        self.mean = torchmetrics.MeanMetric()
        self.steps, self.late, self.seen = 0, late, [0.0]
        self.logged: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        self.steps += 1
        logits = F.normalize(x, dim=1) @ F.normalize(batch, dim=1).T * self.scale.exp()
        loss = x.square().mean()
        if batch_idx >= self.late:
            routing = sum(layer.routes.mean(0).square().sum() for layer in self.layers)
            loss = F.cross_entropy(logits, torch.arange(len(batch))) + routing
        self.average.mul_(0.5).add_(loss.detach())
        self.seen.append(len(batch))
        self.mean(loss.detach(), len(batch))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = [self.steps, float(self.average), [*self.seen]]
        self.logged.append([float(outputs["loss"]), float(self.trainer.callback_metrics["loss"]), *state])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(process: int, module: L.LightningModule, devices: int = 1, strategy: Any = "auto", **options: Any) -> Any:
    """What hooks saw, the metric, the final state, what was warned of, and the plan."""
    data = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, **QUIET, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module.double(), DataLoader([*data], 8))
    state = {name: value.tolist() for name, value in module.state_dict().items()}
    told = {str(each.message) for each in caught if "not a mean" in str(each.message)}
    logged: Any = module.logged
    return logged, float(trainer.callback_metrics["mean"]), state, told


LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "two_stages_here": (1, {"stages": 2}, {}),
    "two_ranks": (2, {}, {}),
    "accumulated": (2, {}, {"accumulate_grad_batches": 3}),
    "interleaved": (2, {"schedule": "interleaved", "layers": "layers"}, {}),
    "recomputed": (2, {"recompute": "always"}, {}),
    "divided_gradients": (2, {"shard_optimizer": "gradients"}, {}),
}


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "two_stages_here", "accumulated"))
def test_a_loss_that_compares_samples_equals_one_device(layout: str) -> None:
    devices, options, trainer = LAYOUTS[layout]
    logged, mean, state, _ = fit(0, Contrastive(), **trainer)
    arguments = {"module": Contrastive(), "devices": devices, "strategy": PipeStrategy(**options), **trainer}
    found = outcomes(fit, devices, timeout=60, **arguments) if devices > 1 else None
    values = [fit(0, **arguments)] if found is None else [each.value for each in found if not each.error or 1 / 0]
    for each in values:
        assert each[1] == pytest.approx(mean, rel=1e-9)
        for one, other in zip(each[0], logged, strict=True):
            assert one[:4] == pytest.approx(other[:4], rel=1e-9)
            assert one[4] == other[4]
        for name, value in state.items():
            torch.testing.assert_close(torch.tensor(each[2][name]), torch.tensor(value), rtol=1e-6, atol=1e-8)
    told = set[str]().union(*(each[3] for each in values))
    assert len(told) == 1
    assert "So batches run whole, with micro_batches=1" in told.pop()
    if found is not None:
        assert " ".join(found[0].output.split()).count("So batches run whole") >= 1  # a line of the plan


class Recurrent(Contrastive):
    """Has recurrent modules around its layers, which refer to their weights weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.GRU(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch[:, None])[0]
        for layer in self.layers:
            x = layer(x)
        logits = F.normalize(self.last(x)[0][:, 0], dim=1) @ F.normalize(batch, dim=1).T
        return F.cross_entropy(logits, torch.arange(len(batch)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mean(outputs["loss"])
        self.log("mean", self.mean, on_step=False, on_epoch=True)


def test_recurrent_modules_outside_the_layers_equal_one_device() -> None:
    _, _, expected, _ = fit(0, Recurrent())
    for _, _, state, _ in run_trainers(fit, 2, module=Recurrent(), devices=2, strategy=PipeStrategy(layers="layers")):
        for name, value in expected.items():
            torch.testing.assert_close(torch.tensor(state[name]), torch.tensor(value), rtol=1e-6, atol=1e-8)


def test_replicas_agree() -> None:
    strategy = PipeStrategy(pipeline_parallel_size=2)
    options = {"module": Contrastive(), "devices": 4, "strategy": strategy, "limit_train_batches": 1}
    found = outcomes(fit, 4, timeout=90, **options)
    errors = [each.error for each in found if each.error]
    assert not errors, errors[0]
    assert len({str(each.value[2]["scale"]) for each in found}) == 1


def test_a_number_of_the_users_is_an_error_unless_nobody_compares() -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)not a mean over the samples.*compare_losses=False"):
        fit(0, Contrastive(), strategy=PipeStrategy(stages=2, micro_batches=4))
    *_, told = fit(0, Contrastive(), strategy=PipeStrategy(stages=2, micro_batches=4, compare_losses=False))
    assert told == set()


def test_a_later_batch_is_left_whole_too() -> None:
    logged, *_ = fit(0, Contrastive(late=1))
    found, _, _, told = fit(0, Contrastive(late=1), strategy=PipeStrategy(stages=2, layers="layers"))
    assert [each[0] for each in found] == pytest.approx([each[0] for each in logged], rel=1e-9)
    assert len(told) == 1
