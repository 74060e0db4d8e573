"""Batches in an order that depends on seed and epoch alone, and that a broken-off epoch resumes where it stopped."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning as L
import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from typing_extensions import override

from recipes.errors import RecipeError


class Draw(NamedTuple):
    """What a training sampler asks a dataset for.

    Args:
        epoch: so that augmentation, masking and the like differ from epoch to epoch, also in worker processes.
        sample: its number.
    """

    epoch: int
    sample: int


def draw_of(key: Draw | int) -> Draw:
    """What a dataset is asked for; evaluation asks for plain indices, always the same way."""
    return key if isinstance(key, Draw) else Draw(0, key)


def generator(seed: int, draw: Draw) -> np.random.Generator:
    """Random numbers for one sample in one epoch, the same in every run with this seed."""
    return np.random.default_rng([seed, draw.epoch, draw.sample])


Order = Callable[[int, int, int], NDArray[np.int64]]
"""Which samples an epoch has, in which order: given their number, a seed and the epoch it returns indices. How many it
returns may not depend on the epoch."""


def shuffled(samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Every sample once.

    Example:
        >>> shuffled(5, seed=1, epoch=0).tolist(), shuffled(5, seed=1, epoch=1).tolist()
        ([4, 0, 1, 2, 3], [1, 4, 0, 3, 2])
    """
    return np.random.default_rng([seed, epoch]).permutation(samples)


class EpochSampler(DistributedSampler[Any]):
    """Samples of one replica, as `Draw`s.

    Being one of torch's distributed samplers tells Lightning that replicas are taken care of.

    Args:
        dataset: anything with a length.
        seed: decides about the order.
        order: which samples an epoch has.
        replicas: number of replicas.
        replica: which of them this one is.
    """

    def __init__(
        self, dataset: Dataset[Any], seed: int, order: Order = shuffled, replicas: int = 1, replica: int = 0
    ) -> None:
        super().__init__(dataset, replicas, replica, seed=seed)
        self.order, self.start = order, 0
        self.samples = len(dataset)  # type: ignore[arg-type]
        self.total = len(order(self.samples, seed, 0))

    @override
    def __len__(self) -> int:
        return -(-self.total // self.num_replicas)

    @override
    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        indices = self.order(self.samples, self.seed, self.epoch)
        # among replicas, the first samples come again at the end to make all shares equal
        for place in range(start, len(self)):
            yield Draw(self.epoch, int(indices[(place * self.num_replicas + self.rank) % self.total]))


class ResumableLoader(DataLoader[Any]):
    """A DataLoader that tells a checkpoint how far it is in its epoch, and goes on from there.

    Lightning asks it through ``state_dict``. What was seen before is not loaded again.
    """

    sampler: EpochSampler
    batch_size: int
    _resumed: dict[str, int] | None = None
    _batches = 0

    @override
    def __iter__(self) -> Any:
        # A generator: the rest runs when the first batch is asked for, by when Lightning has told the epoch.
        resumed, self._resumed = self._resumed, None
        here = resumed is not None and resumed["epoch"] == self.sampler.epoch
        self._batches = resumed["batches"] % len(self) if resumed is not None and here else 0
        self.sampler.start = self._batches * self.batch_size
        for batch in super().__iter__():
            self._batches += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """How many batches of which epoch have been given out."""
        return {"epoch": self.sampler.epoch, "batches": self._batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues that epoch with the next iteration."""
        self._resumed = dict(state)
        self.sampler.set_epoch(state["epoch"])  # worker processes start before Lightning tells the epoch


@dataclass(kw_only=True, eq=False, repr=False)
class ResumableData(L.LightningDataModule):
    """A data module that puts into checkpoints how far its training epoch is, and goes on from there.

    Lightning does as much with the loader's own state, except where a learning rate schedule has asked for the number
    of steps: then (2.6) the loader is made before the state is read, and never told.

    Args:
        batch_size: samples in a batch of one pipeline.
        seed: of the order.
        workers: processes that load batches.
    """

    batch_size: int
    seed: int = 1
    workers: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self._resumed: dict[str, int] | None = None

    @abstractmethod
    def split(self, name: str) -> Dataset[Any]:
        """One split as it is trained or validated with: "train" or "validation"."""

    @property
    def order(self) -> Order:
        """Which samples a training epoch has."""
        return shuffled

    @property
    def collate(self) -> Callable[[list[Any]], Any] | None:
        """A list of samples into a batch; ``None``: as torch does it."""
        return None

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            self.split("validation"),
            batch_size=self.batch_size,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            collate_fn=self.collate,
        )

    @override
    def train_dataloader(self) -> ResumableLoader:
        """Batches in the order of the epoch; an incomplete last one is left out."""
        dataset = self.split("train")
        share = getattr(None if self.trainer is None else self.trainer.strategy, "distributed_sampler_kwargs", {})
        sampler = EpochSampler(dataset, self.seed, self.order, share.get("num_replicas", 1), share.get("rank", 0))
        if len(sampler) < self.batch_size:
            raise RecipeError(
                f"There are {len(sampler)} samples for training, less than one batch of {self.batch_size}.",
                hint="Use more data, or a smaller data.batch_size.",
            )
        loader = ResumableLoader(
            dataset,
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            collate_fn=self.collate,
            drop_last=True,
        )
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            loader.load_state_dict(resumed)
        return loader

    @override
    def state_dict(self) -> dict[str, Any]:
        loader = None if self.trainer is None else self.trainer.train_dataloader
        return {} if loader is None else dict(loader.state_dict())

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict
