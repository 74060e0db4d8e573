"""Code that goes on behind an error of a run."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CommunicationError
from tests.support.processes import in_turn
from tests.support.trainer_runs import QUIET, quiet

WIDTH, BATCH = 3, 4
DATA = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)).double()


class Broken(list[Tensor]):
    """One of its samples cannot be loaded."""

    def __getitem__(self, index: Any) -> Any:
        if index == 9:
            raise ValueError("a broken sample")
        return super().__getitem__(index)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.layers(batch).pow(2).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class DividesItsBatch(Model):
    """As Lightning's example for ImageNet does under every `ParallelStrategy`."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.lines = BATCH, list[str]()

    def setup(self, stage: str) -> None:
        if isinstance(self.trainer.strategy, ParallelStrategy):
            self.size = BATCH // max(1, self.trainer.strategy.num_processes)

    def train_dataloader(self) -> Any:
        return DataLoader([*DATA], self.size)

    def print(self, *args: Any, **kwargs: Any) -> None:
        self.lines += map(str, args)


def divides(process: int, devices: int, replicas: int) -> tuple[int, str]:
    """The batch size, and the plan."""
    quiet()
    module = DividesItsBatch().double()
    strategy = PipeStrategy(layers="layers", micro_batches=2, data_parallel_size=replicas, compare_losses=False)
    L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **{**QUIET, "max_steps": 1}).fit(module)
    return module.size, "\n".join(module.lines)


def goes_on(process: int, devices: int | None, method: str, another: bool) -> float | str:
    """What a validation finds behind a run whose loader has failed."""
    quiet()
    L.seed_everything(7, verbose=False)
    module = Model().double()

    def trainer() -> L.Trainer:
        strategy: Any = PipeStrategy(layers="layers", micro_batches=2, compare_losses=False) if devices else "auto"
        return L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, **{**QUIET, "max_epochs": 1})

    first = trainer()
    with pytest.raises(CommunicationError if process else ValueError, match="a broken sample"):
        getattr(first, method)(module, DataLoader(Broken(DATA), BATCH))
    try:
        second = trainer() if another else first
        second.validate(module, DataLoader([*DATA], BATCH), verbose=False)
    except CommunicationError as error:
        return str(error)
    return float(second.callback_metrics["value"])


CALLS: dict[str, Any] = {
    **{f"{replicas} replicas": partial(divides, devices=2, replicas=replicas) for replicas in (1, 2)},
    "another": partial(goes_on, devices=2, method="fit", another=True),
    "the same": partial(goes_on, devices=2, method="validate", another=False),
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return in_turn(CALLS, 2)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_batch_is_divided_over_pipelines_not_over_ranks(replicas: int, found: dict[str, list[Any]]) -> None:
    for rank, (size, plan) in enumerate(found[f"{replicas} replicas"]):
        assert size == BATCH // replicas
        if rank == 0:
            assert ("trainer.num_devices counts the 2 ranks" in plan) == (replicas == 1)


def test_another_trainer_goes_on_behind_an_error(found: dict[str, list[Any]]) -> None:
    plain = goes_on(0, None, "fit", another=False)
    for value in found["another"]:
        assert value == pytest.approx(plain, rel=1e-9)


def test_the_same_trainer_says_why_it_cannot(found: dict[str, list[Any]]) -> None:
    for rank, text in enumerate(found["the same"]):
        assert f"Rank {rank} cannot run this Trainer again: its last run has failed" in text
        assert "ValueError: a broken sample" in text
        assert "build another Trainer" in text
