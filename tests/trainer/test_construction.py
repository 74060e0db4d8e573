"""Modules built without memory, under a Trainer: each process makes only its own part, with one device's values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_pipe
from lightning_pipe import PipeStrategy
from lightning_pipe.construction import deferred as recording
from lightning_pipe.construction import is_deferred
from lightning_pipe.engine.refusals import check_division
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.parameters.releasing import named_tensors
from lightning_pipe.patches import replaced
from tests.support import oracle
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

WIDTH = 80


class Block(nn.Module):
    """A layer whose buffer comes from its weight, and whose second weight from its first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        nn.init.orthogonal_(self.one.weight)
        with torch.no_grad():
            self.two.weight.add_(self.one.weight, alpha=0.5)
        self.register_buffer("scale", self.one.weight.detach().abs() + 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.two(self.one(x) @ self.scale))


class Lit(L.LightningModule):
    """A model with its input and output embeddings tied."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.build()

    def build(self) -> None:
        self.embed = nn.Embedding(100, WIDTH)
        self.layers = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.head.weight = self.embed.weight
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=0.3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(self.layers(self.embed(batch))).flatten(0, 1), batch.flatten())
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class BuiltLater(Lit):
    """Builds its layers in ``configure_model``."""

    def build(self) -> None:
        self.embed: nn.Module | None = None

    def configure_model(self) -> None:
        if self.embed is None:
            super().build()


class Watch(L.Callback):
    """Notes the values that this process has at a hook."""

    def __init__(self, hook: str = "on_fit_start") -> None:
        self.values: dict[str, Tensor] = {}
        setattr(self, hook, self.note)

    def note(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(trainer.strategy, PipeStrategy):
            assert not any(is_deferred(tensor) for _, tensor in named_tensors(pl_module))
        self.values = {
            name: tensor.detach().clone()
            for name, tensor in named_tensors(pl_module)
            if not isinstance(tensor, AbsentTensor)
        }


@contextmanager
def bytes_made() -> Iterator[list[int]]:
    """The sizes of tensors that get memory for good."""
    made: list[int] = []
    provide = recording.provide

    def counted(cells: Any) -> None:
        provide(cells)
        made.extend(cell.memory.nbytes() for cell in cells)

    recording.provide = counted  # type: ignore[assignment]
    try:
        yield made
    finally:
        recording.provide = provide


WAYS = ("context", "init_module", "configure_model", "averaged", "averaged_later")


def fit(process: int, devices: int | None, way: str) -> dict[str, Any]:
    quiet()
    watch = Watch()
    averaging = [callbacks.EMAWeightAveraging(decay=0.5)] if way.startswith("averaged") else []
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices or 1,
        strategy=PipeStrategy(micro_batches=2, layers="layers", compare_losses=False) if devices else "auto",
        max_epochs=1,
        callbacks=[watch, *averaging],
        **QUIET,
    )
    torch.manual_seed(5)
    context: Any = nullcontext()
    if way == "context" or (way == "averaged" and devices):
        context = lightning_pipe.deferred_init()
    elif way == "init_module":
        context = trainer.init_module()
    kind = BuiltLater if way in ("configure_model", "averaged_later") else Lit
    with bytes_made() as made:
        with context:
            module = kind()
        trainer.fit(module, DataLoader(torch.arange(16 * 8).remainder(100).view(16, 8), batch_size=8))
    return {
        "values": watch.values,
        "made": sum(made),
        "losses": module.losses,
        "weights": oracle.state_of(module),
        "all": sum(tensor.nbytes for tensor in {id(t): t for _, t in named_tensors(module)}.values()),
    }


def fits(process: int, devices: int, ways: Sequence[str]) -> dict[str, Any]:
    return {way: fit(process, devices, way) for way in ways}


@pytest.mark.parametrize(("devices", "ways"), [(2, WAYS), pytest.param(4, ("context",), marks=pytest.mark.slow)])
def test_values_are_those_of_one_device(devices: int, ways: Sequence[str]) -> None:
    plain = {way: fit(0, None, way) for way in {"plain", *ways} & {"plain", "averaged", "averaged_later"}}
    found = run_trainers(fits, devices, devices=devices, ways=ways)
    for way in found[0]:
        expected = plain.get(way, plain["plain"])
        seen: set[str] = set()
        for each in (process[way] for process in found):
            for name, value in each["values"].items():
                assert torch.equal(value, expected["values"][name]), (way, name)
            seen |= set(each["values"])
            assert each["made"] < each["all"] * (1 / devices + 0.3), way
            for name, weight in each["weights"].items():
                torch.testing.assert_close(weight, expected["weights"][name], rtol=1e-4, atol=1e-5)
        assert seen == set(expected["values"])


class Replaced(nn.Linear):
    """What a precision plugin puts in the place of linear layers, as those for low precision do."""


class Replacing(Precision):
    def tensor_init_context(self) -> AbstractContextManager[None]:
        return replaced(nn, "Linear", Replaced)


def test_a_precision_that_replaces_classes() -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=PipeStrategy(layers="layers", micro_batches=1),
        plugins=[Replacing()],
        max_epochs=1,
        **QUIET,
    )
    torch.manual_seed(5)
    with trainer.init_module():
        module = Lit()
    assert type(module.head) is Replaced
    assert is_deferred(module.layers[0].one.weight)
    trainer.fit(module, DataLoader(torch.arange(16 * 8).remainder(100).view(16, 8), batch_size=8))
    expected = fit(0, None, "plain")["weights"]
    for name, weight in oracle.state_of(module).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


def test_quantised_models_are_refused_by_name() -> None:
    module = Lit()
    config = SimpleNamespace(quant_method="bitsandbytes")
    module.layers[2].hf_quantizer = SimpleNamespace(quantization_config=config)
    with pytest.raises(ConfigurationError, match=r"'layers\.2' \(Block\) is quantised by bitsandbytes"):
        check_division(module, [], 2)
    check_division(module, [], 1)


def test_a_plain_trainer_on_a_module_without_memory() -> None:
    found = fit(0, None, "context")
    expected = fit(0, None, "plain")
    assert found["losses"] == expected["losses"]
    for name, weight in expected["weights"].items():
        assert torch.equal(weight, found["weights"][name])
