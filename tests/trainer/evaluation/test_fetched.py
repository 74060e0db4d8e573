"""Batches that are fetched before the loop asks for them come in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loops.progress import _BatchProgress

from lightning_pipe.trainer.evaluation.fetched import FetchedBatches


class Fetcher:
    """Gives some batches, then ends or fails."""

    def __init__(self, number: int, error: Exception | None = None) -> None:
        self.taken, self.done, self._number, self._error = 0, False, number, error

    def __next__(self) -> Any:
        if self.taken == self._number:
            raise StopIteration if self._error is None else self._error
        self.taken += 1
        self.done = self.taken == self._number and self._error is None
        return (f"batch {self.taken - 1}", self.taken - 1, 0)


@pytest.fixture
def batches(request: pytest.FixtureRequest) -> tuple[FetchedBatches, Any]:
    loop = SimpleNamespace(_data_fetcher=Fetcher(*request.param), batch_progress=_BatchProgress())
    moving = SimpleNamespace(convert_input=lambda batch: batch, batch_to_device=lambda batch, dataloader_idx: batch)
    trainer = SimpleNamespace(precision_plugin=moving, strategy=moving)
    return FetchedBatches(trainer, loop, "validation_step"), loop


@pytest.mark.parametrize("batches", [(3,)], indirect=True)
def test_batches_come_in_order_and_end(batches: tuple[FetchedBatches, Any]) -> None:
    fetched, loop = batches
    assert fetched.find(1).batch == "batch 1"  # type: ignore[union-attr]
    assert loop._data_fetcher.taken == 2
    assert (fetched.give().number, fetched.given) == (0, 1)
    assert fetched.find(0) is fetched.current
    assert fetched.find(7) is None
    assert [fetched.give().last, fetched.give().last] == [False, True]
    with pytest.raises(StopIteration):
        fetched.give()


@pytest.mark.parametrize("batches", [(2, OSError("this row cannot be read"))], indirect=True)
def test_the_error_of_the_loader_comes_behind_the_batches_before_it(batches: tuple[FetchedBatches, Any]) -> None:
    fetched, _ = batches
    fetched.up_to(5)
    assert [fetched.give().number, fetched.give().number] == [0, 1]
    with pytest.raises(OSError, match="this row"):
        fetched.give()
