"""One loader per pipeline, its batches on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import getattr_static
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from lightning_pipe.trainer.data.shared_loader import SharedDataLoader
from lightning_pipe.transport.topology import Topology
from tests.support.threads import ThreadTransport, run_threads, thread_world

DATA = TensorDataset(torch.arange(10.0))


def on_three_ranks(make: Callable[[int], Any], use: Callable[[SharedDataLoader], Any], source: int = 0) -> list[Any]:
    """Use a mirror in three processes; every process makes a loader of its own."""
    members = (0, 1, 2)

    def run(transport: ThreadTransport) -> Any:
        transport.make_groups([members])
        share = partial(transport.broadcast_object, source=source, members=members)
        return use(SharedDataLoader(make(transport.process), transport, source, share))

    return run_threads(thread_world(Topology(ranks=3)), run)


def batches(mirror: SharedDataLoader) -> list[Any]:
    return [batch[0].tolist() for batch in mirror]


class Forbidden:
    """A loader that must not be iterated."""

    def __len__(self) -> int:
        return 99

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("iterated")


def test_only_the_source_loads() -> None:
    def make(process: int) -> Any:
        return DataLoader(DATA, batch_size=4, shuffle=True) if process == 1 else Forbidden()

    found = on_three_ranks(make, lambda mirror: (len(mirror), batches(mirror), batches(mirror)), source=1)
    assert found[0] == found[1] == found[2]
    assert found[0][0] == 3
    assert sorted(value for batch in found[0][1] for value in batch) == list(range(10))


@pytest.mark.feature("Data loaders", "indices of predictions", "works")
def test_indices_of_predictions() -> None:
    def make(process: int) -> Any:
        sampler = _IndexBatchSamplerWrapper(BatchSampler(SequentialSampler(DATA), 4, drop_last=False))
        return DataLoader(DATA, batch_sampler=sampler)

    def use(mirror: SharedDataLoader) -> Any:
        return batches(mirror), mirror.batch_sampler.seen_batch_indices

    found = on_three_ranks(make, use)
    assert found[0][1] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert found[0] == found[1] == found[2]


class Resumable(list[int]):
    """Can be gone on with in the middle."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.extend(state["next"])


def test_protocols_see_whether_the_loader_has_a_state() -> None:
    """They look names up without ``__getattr__`` from Python 3.12 on."""
    for make, expected in ((Resumable, True), (list, False)):
        found = on_three_ranks(
            lambda rank, make=make: make([1]), lambda loader: getattr_static(loader, "state_dict", 0)
        )
        assert [bool(each) for each in found] == [expected] * 3
    assert on_three_ranks(lambda rank: Resumable([1]), lambda loader: isinstance(loader, _Stateful)) == [True] * 3


def test_is_the_loader_in_everything_else() -> None:
    def use(mirror: SharedDataLoader) -> Any:
        mirror.worker_init_fn = print
        return mirror.batch_size, mirror.loader.worker_init_fn is print, hasattr(mirror, "nonsense")

    assert on_three_ranks(lambda process: DataLoader(DATA, batch_size=4), use) == [(4, True, False)] * 3
