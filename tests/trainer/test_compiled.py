"""Modules that users compile, before the Trainer gets them or in ``setup``, train as on one device."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import PartitionError
from tests.support import oracle
from tests.support.lit_modules import Data, Lit
from tests.support.trainer_runs import QUIET, quiet


class Blocks(Lit):
    """Containers of two modules each, which are the layers once they are compiled, and their modules before."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)), nn.Linear(16, 4))


class CompiledInSetup(Blocks):
    def setup(self, stage: str) -> None:
        for block in self.model:
            block.compile(backend="eager")


class Wrapped(Blocks):
    """Has what ``torch.compile`` makes of layers, whose attributes are set in the layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(torch.compile(block, backend="eager") for block in self.model))


class CompiledStep(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.forward = torch.compile(self.forward, backend="eager")

    validation_step = L.LightningModule.validation_step  # without gradients it would be compiled once more


class CompiledWhole(Blocks):
    def setup(self, stage: str) -> None:
        self.model.compile(backend="eager")


def fit(module: L.LightningModule, strategy: Any) -> dict[str, torch.Tensor]:
    quiet()
    L.seed_everything(7, verbose=False)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, limit_val_batches=1, **QUIET)
    trainer.fit(module.double(), datamodule=Data(length=16))
    return oracle.state_of(module)


@pytest.mark.feature("Hooks", "torch.compile of layers", "works")
@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        (CompiledInSetup, "model"),
        (Wrapped, None),
        # compiles the whole forward pass, which takes seconds
        pytest.param(CompiledStep, "model", marks=pytest.mark.slow),
        (CompiledWhole, None),
    ],
)
def test_it_trains_as_on_one_device(kind: type[Lit], layers: str | None) -> None:
    torch.manual_seed(3)
    plain = kind()
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    expected = fit(plain, "auto")
    (module := kind()).load_state_dict(state)
    found = fit(module, PipeStrategy(stages=2, micro_batches=1, layers=layers))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)


def test_layers_compiled_as_one_are_one_layer() -> None:
    with pytest.raises(PartitionError, match="Compile the layers one by one"):
        fit(CompiledWhole(), PipeStrategy(stages=3, micro_batches=1))
