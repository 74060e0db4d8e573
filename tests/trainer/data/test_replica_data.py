"""Replicas whose data differs in length: an error that says so, unless the Trainer's limits make it equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_pipe.errors import PipeError
from tests.support.lit_modules import Lit, dataset
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet


class Streams(IterableDataset[Any]):
    """Ends earlier on one replica."""

    def __init__(self, trainer: L.Trainer, lengths: tuple[int, int]) -> None:
        self.trainer, self.lengths = trainer, lengths

    def __iter__(self) -> Iterator[Any]:
        samples = dataset(80)
        yield from (samples[index] for index in range(self.lengths[self.trainer.strategy.data_parallel_rank]))


def steps(ranks: int, lengths: tuple[int, int], sized: bool = False, **options: Any) -> int | str:
    from lightning_pipe import PipeStrategy

    quiet()
    strategy = PipeStrategy(data_parallel_size=2, micro_batches=2, compare_losses=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2 * ranks,
        strategy=strategy,
        max_epochs=1,
        use_distributed_sampler=False,
        **QUIET,
        **options,
    )

    class Own(Lit):
        def train_dataloader(self) -> Any:
            if sized:
                return DataLoader(dataset(lengths[strategy.data_parallel_rank]), batch_size=8)
            return DataLoader(Streams(trainer, lengths), batch_size=8)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    try:
        trainer.fit(Own().double())
    except PipeError as error:
        return f"{type(error).__name__}: {error}"
    return trainer.global_step


def limited(process: int, ranks: int) -> list[int | str]:
    return [
        steps(ranks, (16, 32), limit_train_batches=2),
        steps(ranks, (32, 16), sized=True, limit_train_batches=2),
        steps(ranks, (32, 16)),
    ]


@pytest.mark.feature(
    "Data loaders",
    "replicas with data of different length",
    "refused",
    "when the shortest has ended, with what was counted",
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_data_of_different_length(ranks: int) -> None:
    found = run_trainers(limited, 2 * ranks, timeout=90, ranks=ranks)
    for process, values in enumerate(found):
        assert values[:2] == [2, 2]
        assert "datasets differ in length" in str(values[2])
        assert ("2 batches, others have more" if process >= ranks else "3 or more, others have fewer") in str(values[2])
