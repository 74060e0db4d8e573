"""Losses that layers keep beside what they return (routing, regularisation) equal one device, or the hint says how."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CutError
from tests.support.pairs import slow_but
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

WIDTH = 3


class Layer(nn.Module):
    """Keeps a loss of its own: the tensor in the place of nothing or of a list, or in a list for all calls."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(WIDTH, WIDTH), form
        self.aux: Any = None if form == "nothing" else []

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.linear(x))
        loss = out.pow(2).mean() + 0.1 * self.linear.weight.pow(2).sum()
        if self.form == "appended":
            self.aux.append(loss)
        else:
            self.aux = loss
        return out


class Model(L.LightningModule):
    """Adds the losses of four layers to its own."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layers, self.form = nn.Sequential(*(Layer(form) for _ in range(4))), form

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        out: Tensor = self.layers(x)
        losses = [layer.aux[-1] if self.form == "appended" else layer.aux for layer in self.layers]
        return out.mean() + sum(losses)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def trained(process: int, form: str, options: dict[str, Any] | None) -> dict[str, Tensor]:
    """The weights after a training; ``options=None``: on one device."""
    quiet()
    torch.manual_seed(3)
    model, data = Model(form).double(), torch.randn(12, WIDTH).double()
    strategy = "auto" if options is None else PipeStrategy(layers="layers", micro_batches=2, **options)
    devices = 1 if options is None else 2
    L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, **QUIET).fit(
        model, DataLoader(data, batch_size=4)
    )
    return {name: value.detach() for name, value in model.named_parameters()}


def trained_in_all_forms(process: int, schedule: str) -> list[dict[str, Tensor]]:
    return [trained(process, form, {"schedule": schedule}) for form in ("nothing", "list")]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("schedule", slow_but(["gpipe", "1f1b", "interleaved"], "1f1b"))
def test_a_loss_that_layers_keep_trains_them_as_on_one_device(schedule: str) -> None:
    one = trained(0, "nothing", None)
    for found in run_trainers(trained_in_all_forms, 2, timeout=50, schedule=schedule):
        for weights in found:
            torch.testing.assert_close(weights, one, rtol=1e-12, atol=1e-12)


def refused(process: int) -> str:
    with pytest.raises(Exception, match=r"`self.layers.0.aux` is read where it has no value") as raised:
        trained(process, "appended", {"schedule": "1f1b"})
    assert process == 1 or isinstance(raised.value, CutError)
    return str(raised.value)


@pytest.mark.timeout(60)
def test_a_list_that_grows_is_refused_with_what_works() -> None:
    assert "`self.aux = tensor`" in run_trainers(refused, 2, timeout=50)[0]


# ------------------------------------------------------------------ losses over the routing of a whole batch


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
    with pytest.warns(UserWarning, match="not a mean over the samples.*Gradients may differ.*needs micro_batches=1"):
        assert balanced(PipeStrategy(layers="layers", stages=2, micro_batches=4)) != pytest.approx(one, rel=1e-2)
    assert balanced(PipeStrategy(layers="layers", stages=2, micro_batches=1)) == pytest.approx(one, rel=1e-12)
