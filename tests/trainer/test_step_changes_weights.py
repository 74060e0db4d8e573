"""Steps that change or freeze weights, or carry state from batch to batch: what messages say, and that it helps."""

from __future__ import annotations

import copy
import re
import warnings
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CutError
from tests.support.processes import in_turn, refusals
from tests.support.trainer_runs import QUIET, quiet


class Step(L.LightningModule):
    """A chain of layers, of whose weights it keeps averages if a subclass says so."""

    accumulated = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for average, weight in zip(self.average.parameters(), self.net.parameters(), strict=True):
            average.mul_(0.9).add_(weight, alpha=0.1)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.net(x[:, 0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.1)


class InStep(Step):
    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(x, batch_idx)
        self.follow()
        return loss


class Freezes(Step):
    """Trains parts in turns."""

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        self.net[2].requires_grad_(batch_idx % 2 == 0)
        return super().training_step(x, batch_idx)


class FrozenMeanwhile(Step):
    """Freezes a part in a hook, while its gradient waits for the last batch of three."""

    accumulated = 3

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.net[2].requires_grad_(batch_idx < 2)


class Zeroes(Step):
    """Zeroes gradients before it computes, as with manual optimization."""

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        self.optimizers().zero_grad(set_to_none=False)
        return super().training_step(x, batch_idx)


class Scales(Step):
    """Scales its loss by a gradient, which one device has of the batch before it."""

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        loss, last = super().training_step(x, batch_idx), self.net[-1].weight
        return loss if last.grad is None else loss / (1 + last.grad.norm())


class Grows(Step):
    """Makes a part of itself in a later batch."""

    trained, ahead = True, False

    def made(self) -> Any:
        head = nn.Linear(4, 4)
        for value in head.parameters():
            nn.init.constant_(value, 0.3)
        return head.double().requires_grad_(self.trained)

    def grown(self, h: Tensor, batch_idx: int) -> Tensor:
        if batch_idx and not hasattr(self, "head"):
            self.head = self.made()
        return self.head(h) if batch_idx else h

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        h = self.net(self.grown(x[:, 0], batch_idx) if self.ahead else x[:, 0])
        return (h if self.ahead else self.grown(h, batch_idx)).square().mean()


class GrowsScale(Grows):
    """... a parameter alone, in one of its parts."""

    def grown(self, h: Tensor, batch_idx: int) -> Tensor:
        if batch_idx and not hasattr(self.average, "scale"):
            self.average.scale = nn.Parameter(torch.full((4,), 2.0).double())
        return h * self.average.scale if batch_idx else h


class GrowsAhead(Grows):
    """... ahead of the layers, which it does not train."""

    trained, ahead = False, True


class GrowsFrozen(Grows):
    trained = False


class GrowsAtFirst(Grows):
    """The remedy."""

    def __init__(self) -> None:
        super().__init__()
        self.head = self.made()


class GrowsUnseen(Grows):
    """... in another way than by an assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList()

    def grown(self, h: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1 and not self.heads:
            self.heads.append(self.made())
        return self.heads[0](h) if batch_idx else h


class Counts(Grows):
    """Makes a metric and a module without parameters."""

    def made(self) -> Any:
        self.metric = MeanMetric()
        self.metric.update(1.0)
        self.same = self.net  # which is there already
        del self.same
        return nn.Tanh()


class Truncated(Step):
    """Begins each batch with the hidden state of the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Linear(4, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)
        self.hidden: Tensor | None = None
        del self.net, self.average

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        out, hidden = self.rnn(torch.tanh(self.embed(x)), self.hidden)
        self.hidden = hidden.detach()
        return self.head(out).square().mean()


class Added(Truncated):
    """... and adds it between layers, unless it is the first one."""

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        h = torch.tanh(self.embed(x))
        out, _ = self.rnn(h if self.hidden is None else h + self.hidden)
        self.hidden = out.detach().mean(1, keepdim=True)
        return self.head(out).square().mean()


Trained = tuple[dict[str, Tensor], list[str]]


def fit(process: int, kind: type[Step], devices: int = 1, strategy: Any = "auto") -> Trained:
    """The weights after three batches, and the warnings."""
    quiet()
    module = kind().double()
    data = [torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(seed)).double() for seed in range(3)]
    options = {**QUIET, "accumulate_grad_batches": kind.accumulated}
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    return module.state_dict(), [str(each.message) for each in caught]


STAGES: dict[str, Any] = {"layers": ["embed", "rnn", "head"], "balance": [2, 1]}
TOLD: dict[type[Step], tuple[str, dict[str, Any]]] = {
    InStep: (
        r"'\w+_' changes `self\.\S+` in place in the step.*[\s\S]* on_train_batch_end; .*EMAWeightAveraging",
        {},
    ),
    Added: (r"goes from one micro-batch to the next \(self.hidden\) needs micro_batches=1", STAGES),
    Zeroes: (r"reads or sets the gradient of 'net\.\S+'.* on_before_optimizer_step", {}),
    Scales: (r"reads or sets the gradient of 'net\.\S+'.* on_before_optimizer_step", {}),
    Freezes: (r"freezes weights and trains them again .* needs one device", {}),
    Grows: (r"the step adds `self\.head`, .* Create it in __init__ or configure_model", {}),
    GrowsScale: (r"the step adds `self\.average\.scale`, .* Create it in __init__ or configure_model", {}),
    GrowsAhead: (r"the step adds `self\.head`, .* Create it in __init__ or configure_model", {}),
    GrowsFrozen: (r"the step adds `self\.head`, .* Create it in __init__ or configure_model", {}),
    GrowsUnseen: (r"'heads\.0\.bias' is on some ranks alone.* Create it in __init__ or configure_model", {}),
}


def told(process: int, kind: type[Step]) -> None:
    fit(process, kind, 2, PipeStrategy(compare_losses=False, **TOLD[kind][1]))


def test_what_the_step_does_is_named_with_a_remedy() -> None:
    for kind, errors in refusals(told, 2, TOLD).items():
        (error, *_) = (each for each in errors if isinstance(each, CutError))
        assert re.search(TOLD[kind][0], str(error).replace("\n", " "))


STRATEGIES: dict[Any, tuple[type[Step], dict[str, Any]]] = {
    "whole": (Truncated, {"micro_batches": 1}),
    "whole, added": (Added, {"micro_batches": 1, **STAGES}),
    "cut": (Truncated, {**STAGES, "balance": [1, 2]}),
    "frozen meanwhile": (FrozenMeanwhile, {"schedule": "chimera"}),
    "counts": (Counts, {"compare_losses": False}),
    "grows at first": (GrowsAtFirst, {"compare_losses": False}),
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Trained]]:
    runs = {name: (kind, PipeStrategy(**options)) for name, (kind, options) in STRATEGIES.items()}
    return in_turn({name: partial(fit, kind=run[0], devices=2, strategy=run[1]) for name, run in runs.items()}, 2)


def check(name: str, found: dict[str, list[Trained]]) -> None:
    for key, value in fit(0, STRATEGIES[name][0])[0].items():
        for weights, _ in found[name]:
            torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["whole", "whole, added"])
def test_whole_batches_help(name: str, found: dict[str, list[Trained]]) -> None:
    check(name, found)


@pytest.mark.parametrize("name", ["counts", "grows at first"])
def test_a_step_may_make_what_has_no_parameters_or_is_there(name: str, found: dict[str, list[Trained]]) -> None:
    check(name, found)


@pytest.mark.parametrize("kind", [Grows, GrowsScale, GrowsUnseen])
def test_one_process_has_what_a_step_adds(kind: type[Step]) -> None:
    state = fit(0, kind, 1, PipeStrategy(stages=2, compare_losses=False))[0]
    for name, value in fit(0, kind)[0].items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def test_a_gradient_that_waits_is_summed_over_copies_when_its_parameter_is_frozen(
    found: dict[str, list[Trained]],
) -> None:
    check("frozen meanwhile", found)


def test_state_from_batch_to_batch_is_told_of_whole_batches(found: dict[str, list[Trained]]) -> None:
    words = "State that goes from batch to batch (self.hidden) needs micro_batches=1"
    assert any(words in each for _, of_rank in found["cut"] for each in of_rank)
