"""Small LightningModules that change state while they train: what `tests/trainer/test_state_contract.py` runs.

A program is a class that says what it does around four layers, with the verdict that each schedule owes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, SAMPLES, BATCH = 3, 20, 4
DATA = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).double()

EQUAL = ""
"""The verdict that nothing differs; any other verdict is the pattern of an error that names cause and remedy."""
STALE = r"(Cut|GivenOtherValues)Error"
"""Where a stage would compute with another value than the step in order: an error about the cut, with a remedy."""
BATCH_WHOLE, MICRO_BATCHES, ONE_STAGE = "batch", "calls", "stage"
"""The oracles: a plain Trainer with the whole batches, or with the micro-batches as batches; and, where random numbers
are drawn for each micro-batch, all of the module on one process."""


@dataclass(frozen=True)
class Program:
    """A module of the table.

    Args:
        module: the class.
        oracle: with what it is compared.
        verdicts: by phase ("train", "evaluate"), or phase and schedule ("train_chimera"); else `EQUAL`.
    """

    module: type[Base]
    oracle: str
    verdicts: dict[str, str] = field(default_factory=dict)

    def expected(self, phase: str, schedule: str) -> str:
        """The verdict that is owed."""
        return self.verdicts.get(f"{phase}_{schedule}", self.verdicts.get(phase, EQUAL))


PROGRAMS: dict[str, Program] = {}
_Module = TypeVar("_Module", bound="type[Base]")


def program(oracle: str, **verdicts: str) -> Callable[[_Module], _Module]:
    """Put a module into the table."""

    def put(module: _Module) -> _Module:
        assert module.__name__ not in PROGRAMS
        PROGRAMS[module.__name__] = Program(module, oracle, verdicts)
        return module

    return put


class Layer(nn.Module):
    """Computes by its parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class Dropping(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.drop(super().forward(x))  # type: ignore[no-any-return]


class Base(L.LightningModule):
    """Four layers, and what the step does before, between and behind them.

    Args:
        parts: the batches of the Trainer that are one batch of the pipeline.
    """

    layer: ClassVar[type[nn.Module]] = Layer
    remedy: ClassVar[str] = "CounterInAHook"
    mixes: ClassVar[bool] = False
    """Whether what it computes of a sample depends on those before it, or beside it in the micro-batch."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.parts, self.read = parts, list[float]()
        self.layers = nn.Sequential(*(self.layer() for _ in range(4)))
        self.make()

    def make(self) -> None:
        """Set attributes."""

    def before(self, x: Tensor) -> Tensor:
        """Code of the step before the layers."""
        return x

    def between(self, hidden: Tensor) -> Tensor:
        """Code of the step behind the first layer."""
        return hidden

    def behind(self, out: Tensor) -> Tensor:
        """Code of the step behind the layers: the loss."""
        return out.pow(2).mean()

    def step(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](self.before(x))
        return self.behind(self.layers[1:](self.between(hidden)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.step(batch[0])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.step(batch[0]))

    def seen(self) -> list[Any]:
        """What hooks read of the state."""
        return []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.parts == 0:
            self.read += [float(each) for each in self.seen()]

    def on_validation_epoch_end(self) -> None:
        self.read += [float(each) for each in self.seen()]

    def data(self, size: int) -> Any:
        """What the Trainer is given."""
        return DataLoader(TensorDataset(DATA), size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
