"""What a batch keeps of its micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_pipe.engine.batch import Batch
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.intercept.random_streams import RandomStreams


def batch(*micro_batches: Any) -> Batch:
    streams = RandomStreams(0, torch.device("cpu"))
    count = len(micro_batches)
    return Batch(lambda _, part: part, micro_batches, [0] * count, [1.0] * count, streams, training=True)


def test_results_are_kept_without_their_graphs() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    found = batch(1)
    found.keep(0, loss, {"loss": loss, "text": "kept"})
    assert not found.results[0]["loss"].requires_grad
    assert found.results[0]["text"] == "kept"


def test_one_constant_loss_is_allowed_and_no_loss_that_trains_is_not() -> None:
    found = batch(1, 2)
    found.keep(0, torch.zeros(()), torch.zeros(()))
    with pytest.raises(ConfigurationError, match="depends on no parameter that is trained"):
        found.keep(1, torch.zeros(()), torch.zeros(()))


def test_a_step_may_take_its_micro_batch_apart() -> None:
    found = batch({"x": torch.zeros(2)})
    found.slice(0).pop("x").add_(1)
    assert found.slice(0)["x"].tolist() == [0, 0]
