"""What layers read of their LightningModule is what they read on one device, or an error names it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from tests.support.pairs import pairs
from tests.support.processes import run_trainers
from tests.trainer.test_layer_state import WIDTH, Model, check, found


class Reads(nn.Module):
    """Computes with an attribute of a module of which it is a part.

    Args:
        owner: gives that module.
    """

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.linear, self.owner = nn.Linear(WIDTH, WIDTH), owner

    def forward(self, x: Tensor) -> Tensor:
        owner = self.owner[0] if isinstance(self.owner, list) else self.owner()
        return torch.tanh(self.linear(x)) * owner.gain


class Owner(Model):
    """All layers read its gain."""

    def __init__(self) -> None:
        super().__init__()
        self.gain: Any = 1.0
        self.layers = nn.Sequential(*(Reads(self.reference()) for _ in range(4)))

    def reference(self) -> Any:
        return [self]


class FromTheBatch(Owner):
    """What every stage can compute by itself."""

    def step(self, x: Tensor, resets: bool) -> Tensor:
        self.gain = 1.0 + float(x.mean())
        hidden = self.layers[0](x)
        self.gain = (2.0 if resets else 1.0) + x.mean()
        return self.layers[3](self.layers[2](self.layers[1](hidden))).pow(2).mean()


class InAList(FromTheBatch):
    def step(self, x: Tensor, resets: bool) -> Tensor:
        self.items = [{"x": float(x.mean())}, {float("nan")}]
        self.gain = 1.0
        return super().step(x, resets)


class FromItself(Owner):
    def before(self, resets: bool) -> None:
        self.gain *= 0.9


class Behind(Owner):
    def behind(self, resets: bool) -> None:
        self.gain *= 0.9


class Counted(Owner):
    """Reads nothing that it sets."""

    def before(self, resets: bool) -> None:
        self.count += 1
        self.gain = 0.9**self.count


class Weakly(Behind):
    def reference(self) -> Any:
        return weakref.ref(self)


class ByAFunction(Behind):
    def reference(self) -> Any:
        return lambda: self


class OfATensor(Owner):
    def behind(self, resets: bool) -> None:
        self.gain = torch.as_tensor(self.gain, dtype=torch.float64) * 0.9


class OfABuffer(Owner):
    def __init__(self) -> None:
        super().__init__()
        del self.gain
        self.register_buffer("gain", torch.ones((), dtype=torch.float64))

    def behind(self, resets: bool) -> None:
        self.gain = self.gain * 0.9


LINEAR: list[tuple[int, dict[str, Any]]] = [
    (2, {"micro_batches": 2, "schedule": "gpipe"}),
    (2, {"micro_batches": 4, "stages": 4, "schedule": "interleaved"}),
]
FURTHER: list[tuple[int, dict[str, Any]]] = [
    (2, {"micro_batches": 2, "schedule": "gpipe", "recompute": "always"}),
    (2, {"micro_batches": 2, "schedule": "dualpipev"}),
    (4, {"micro_batches": 4}),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("devices", "options"), [*LINEAR, *(pytest.param(*each, marks=pytest.mark.slow) for each in FURTHER)], ids=str
)
def test_what_each_stage_computes_by_itself_equals_one_device(devices: int, options: dict[str, Any]) -> None:
    check(FromTheBatch, devices, **options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model", [InAList, Owner])
def test_what_says_the_same_on_all_stages_equals_one_device(model: type[Model]) -> None:
    check(model, micro_batches=2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("model", "devices", "options"),
    [
        *((Behind, *each) for each in LINEAR),
        *((model, *LINEAR[0]) for model in (FromItself, Counted, Weakly, ByAFunction, OfATensor, OfABuffer)),
        *(pytest.param(Behind, *each, marks=pytest.mark.slow) for each in FURTHER),
    ],
    ids=str,
)
def test_what_other_micro_batches_have_left_is_refused(
    model: type[Model], devices: int, options: dict[str, Any]
) -> None:
    with pytest.raises(CutError, match=r"'layers\.0', .* is given other values .* have changed .*`self\.gain`"):
        run_trainers(found, devices, timeout=40, devices=devices, model=model, stream_evaluation=False, **options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("model", "devices", "options"),
    pairs(
        [FromItself, Behind],
        [
            (2, {}),
            (2, {"recompute": "always", "stream_evaluation": False}),
            (2, {"stages": 4, "schedule": "interleaved"}),
            (1, {"stages": 2, "micro_batches": 2}),
        ],
    ),
)
def test_what_batches_have_left_equals_one_device(model: type[Model], devices: int, options: dict[str, Any]) -> None:
    """One after the other: batches of one micro-batch, evaluations, or all stages on one rank."""
    check(model, devices, **options)


# ------------------------------------------------------------------ what is computed again


class Averages(Owner):
    """The loss of each micro-batch is computed with what the ones before it have left, in tensors and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.queue = torch.ones(WIDTH, dtype=torch.float64), [0.5]

    def step(self, x: Tensor, resets: bool) -> Tensor:
        out = self.layers(x)
        loss = (out - self.mean).pow(2).mean() * sum(self.queue)
        self.mean.mul_(0.9).add_(0.1 * out.detach().mean(0))
        self.queue.append(float(out.detach().mean()))
        return loss


class AveragesFirst(Owner):
    """What it changes in place belongs to the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.ones(WIDTH, dtype=torch.float64)

    def step(self, x: Tensor, resets: bool) -> Tensor:
        out = self.layers(x)
        self.mean.mul_(0.9).add_(0.1 * out.detach().mean(0))
        return (out * (out * self.mean)).mean()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model", [Averages, AveragesFirst])
@pytest.mark.parametrize("devices", [1, 2])
def test_what_is_computed_again_finds_the_attributes_of_its_micro_batch(model: type[Model], devices: int) -> None:
    check(model, devices, stages=2, micro_batches=4, schedule="gpipe", recompute="always", stream_evaluation=False)


@pytest.mark.parametrize("model", [FromItself, Behind])
def test_what_layers_compute_again_reads_the_attributes_of_its_micro_batch(model: type[Model]) -> None:
    check(model, 1, stages=2, micro_batches=2, schedule="gpipe", recompute="always")
