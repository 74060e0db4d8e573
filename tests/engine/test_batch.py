"""What a batch keeps of its micro-batches."""

from __future__ import annotations

from typing import Any

import torch

from lightning_pipe.engine.batch import Batch
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
