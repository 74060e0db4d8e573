"""The order of an epoch, and epochs that go on where they were broken off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import Dataset, DistributedSampler

from recipes.data.loading import (
    Draw,
    EpochSampler,
    ResumableData,
    ResumableLoader,
    generator,
    shuffled,
)
from recipes.errors import RecipeError
from tests.support.oracle import SILENT
from tests.support.pairs import pairs


class Keys(Dataset[tuple[int, int]]):
    """Returns what it is asked for."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, key: Draw) -> tuple[int, int]:
        return key.epoch, key.sample


class Data(ResumableData):
    collate = list  # type: ignore[assignment]

    def __init__(self, samples: int = 22, batch_size: int = 4, workers: int = 0) -> None:
        super().__init__(batch_size=batch_size, seed=3, workers=workers)
        self.samples = samples

    def split(self, name: str) -> Keys:
        return Keys(self.samples)


def loader(**settings: int) -> ResumableLoader:
    return Data(**settings).train_dataloader()


def epoch_of(made: ResumableLoader, epoch: int) -> list[Any]:
    made.sampler.set_epoch(epoch)
    return list(made)


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own() -> None:
    made = loader(batch_size=1)
    first, second = (epoch_of(made, epoch) for epoch in (0, 1))
    assert sorted(sample for [(_, sample)] in first) == list(range(22))
    assert {epoch for [(epoch, _)] in second} == {1}
    assert [s for [(_, s)] in first] != [s for [(_, s)] in second]
    assert first == epoch_of(loader(batch_size=1), 0)


def test_incomplete_batches_are_left_out() -> None:
    made = loader()
    assert len(made) == len(epoch_of(made, 0)) == 5


@pytest.mark.parametrize(("workers", "done"), pairs([0, 2], [3, 1, 5]))
def test_a_broken_off_epoch_goes_on_where_it_stopped(workers: int, done: int) -> None:
    whole = epoch_of(loader(), 2)
    broken = loader(workers=workers)
    broken.sampler.set_epoch(2)
    batches = iter(broken)
    seen = [next(batches) for _ in range(done)]
    assert seen == whole[:done]
    state = broken.state_dict()
    assert state == {"epoch": 2, "batches": done}

    resumed = loader(workers=workers)
    resumed.load_state_dict(state)
    rest = list(resumed)
    # at the end of an epoch the next one begins; Lightning then sets its number
    assert rest == (whole[done:] if done < 5 else whole)
    assert epoch_of(resumed, 3) == epoch_of(loader(), 3)
    assert len(resumed) == 5


def test_a_checkpoint_says_how_far_the_epoch_is_even_if_the_schedule_asked_for_the_number_of_steps(
    tmp_path: Path,
) -> None:
    def trained(*callbacks: L.Callback, checkpoint: Path | None = None) -> list[Any]:
        module = Collecting()
        trainer = L.Trainer(
            max_epochs=3,
            accelerator="cpu",
            callbacks=list(callbacks),
            **SILENT | {"enable_checkpointing": bool(callbacks)},
        )
        trainer.fit(module, datamodule=Data(), ckpt_path=checkpoint)
        return module.batches

    whole = trained(ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=8, save_top_k=-1))
    assert trained(checkpoint=tmp_path / "step=8.ckpt") == whole[8:]


class Collecting(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.batches.append(batch)
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_state_of_another_epoch_is_not_taken_up() -> None:
    made = loader()
    made.load_state_dict({"epoch": 2, "batches": 3})
    assert epoch_of(made, 3) == epoch_of(loader(), 3)


def test_replicas_share_an_epoch() -> None:
    dataset = Keys(10)
    parts = [list(EpochSampler(dataset, 3, replicas=3, replica=replica)) for replica in range(3)]
    assert [len(part) for part in parts] == [4, 4, 4]
    order = shuffled(10, seed=3, epoch=0)
    together = [draw.sample for draws in zip(*parts, strict=True) for draw in draws]
    assert together == [*order, *order[:2]]


def test_lightning_leaves_the_sampler_alone() -> None:
    assert isinstance(loader().sampler, DistributedSampler)


def test_random_numbers_depend_on_seed_epoch_and_sample_only() -> None:
    draws = [generator(1, Draw(0, 0)), generator(1, Draw(0, 1)), generator(1, Draw(1, 0)), generator(2, Draw(0, 0))]
    values = [made.random() for made in draws]
    assert len(set(values)) == 4
    assert generator(1, Draw(0, 1)).random() == values[1]


def test_too_few_samples_for_a_batch() -> None:
    with pytest.raises(RecipeError, match="3 samples for training, less than one batch of 4"):
        loader(samples=3)
