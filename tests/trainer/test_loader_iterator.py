"""What a step of evaluation gets as ``dataloader_iter``."""

from __future__ import annotations

import pytest

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.trainer.loader_iterator import LoaderIterator


def test_every_run_of_a_step_gets_the_same_batch() -> None:
    batches = LoaderIterator(iter("ab"))
    batches.fetch()
    assert [next(batches.of_run()), next(batches.of_run())] == ["a", "a"]
    batches.fetch()
    batches.fetch()  # the step has taken nothing
    assert next(batches.of_run()) == "b"
    with pytest.raises(StopIteration):
        batches.fetch()


def test_a_second_batch_in_one_call_raises() -> None:
    batches = LoaderIterator(iter("ab"))
    batches.fetch()
    of_run = batches.of_run()
    next(of_run)
    with pytest.raises(ConfigurationError, match="takes a second batch from its dataloader_iter"):
        next(of_run)
