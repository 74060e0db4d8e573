"""Predictions of replicas are returned in the dataset's order, as one device returns them."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from lightning_pipe.trainer.evaluation.replica_predictions import Share, in_order
from tests.support import processes
from tests.support.trainer_runs import QUIET, quiet


def shares(samples: int, replicas: int, size: int, kind: Any) -> list[Share]:
    """What replicas return whose step returns the numbers of its samples."""
    found = []
    for replica in range(replicas):
        batches = torch.arange(replica, samples, replicas).split(size) if replica < samples else ()
        found.append(Share([kind(batch) for batch in batches], [len(batch) for batch in batches], size))
    return found


KINDS = {
    "tensor": lambda batch: batch,
    "nested": lambda batch: {"row": (batch.float(), torch.stack([batch, -batch], 1))},
    "names": lambda batch: [f"sample {number}" for number in batch.tolist()],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("samples", [1, 3, 8, 13])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_batches_are_those_of_one_device(kind: str, samples: int, replicas: int) -> None:
    for size in (1, 2, 4):
        expected = [KINDS[kind](batch) for batch in torch.arange(samples).split(size)]
        found = in_order(shares(samples, replicas, size, KINDS[kind]))
        assert found is not None
        assert str(found) == str(expected)


@pytest.mark.parametrize(
    "kind",
    [
        lambda batch: batch.sum(),
        lambda batch: {"row": batch, "index": 3},
        lambda batch: None,
        lambda batch: torch.zeros(len(batch), int(batch[0])),  # as long as the longest of its samples
    ],
)
def test_what_has_no_entry_for_each_sample_is_left(kind: Any) -> None:
    assert in_order(shares(9, 2, 3, kind)) is None


def test_without_batches() -> None:
    assert in_order([Share([], [], 4), Share([], [], 4)]) == []


class Predicting(L.LightningModule):
    def __init__(self, of_batch: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.of_batch = of_batch

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        out = self.layers(batch)
        return out.mean() if self.of_batch else {"out": out, "first": batch[:, 0].tolist()}


def predicted(process: int, devices: int, ranks: int, limit: int | None = None) -> tuple[list[Any], list[str]]:
    """What ``predict`` returns for one loader, for two, and where nothing can be joined; warnings."""
    quiet()
    found = []
    for of_batch, several in ((False, False), (False, True), (True, False)):
        strategy: Any = PipeStrategy(data_parallel_size=devices // ranks) if devices > 1 else "auto"
        trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, limit_predict_batches=limit, **QUIET)
        rows = torch.arange(33.0).view(11, 3)
        loaders = [DataLoader(rows, batch_size=4), DataLoader(rows[:5] * 2, batch_size=2)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            returned: Any = trainer.predict(Predicting(of_batch), loaders if several else loaders[0])
        found.append(returned)
    return found, [str(each.message) for each in caught if "predictions of its own replica" in str(each.message)]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_predict_returns_what_one_device_returns(ranks: int) -> None:
    alone, _ = predicted(0, 1, 1)
    several = processes.run_trainers(predicted, 2 * ranks, timeout=60, devices=2 * ranks, ranks=ranks)
    for (one, two, left), said in several:
        torch.testing.assert_close(one, alone[0])
        torch.testing.assert_close(two, alone[1])
        assert len(left) == 2  # of three batches of one device
        assert len(said) == (said is several[0][1])
