"""One process that holds all stages needs nobody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CommunicationError
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.base import Lane
from lightning_pipe.transport.single_process import SingleProcess


def test_collectives_of_one_process_are_done() -> None:
    transport, tensor = SingleProcess(), torch.ones(2)
    for work in (
        transport.all_reduce(tensor, (0,)),
        transport.broadcast(tensor, 0, (0,)),
        transport.reduce_scatter([tensor], (0,)),
    ):
        work.wait()
    transport.barrier()
    assert tensor.tolist() == [1.0, 1.0]
    assert transport.all_gather_object("x", (0,)) == ["x"]
    assert transport.broadcast_object(tensor, 0, (0,)) is tensor


def test_there_is_nobody_to_send_to() -> None:
    transport, data = SingleProcess(), torch.zeros(1, dtype=torch.uint8)
    calls: list[Any] = [
        lambda: transport.send(data, 0, Lane("forward")),
        lambda: transport.receive(data, 0, Lane("forward")),
        lambda: transport.send_object("x", 0, 0),
        lambda: transport.receive_object(0, 0),
    ]
    for call in calls:
        with pytest.raises(CommunicationError, match="no receiver"):
            call()


@pytest.mark.parametrize("schedule", ["interleaved", "dualpipev"])
def test_stages_of_one_process_train_without_messages(schedule: str) -> None:
    torch.manual_seed(0)
    family = schedules.get(schedule)
    stages = family.build(1, 4).stages
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(stages)))
    batch = torch.randn(4, 3)
    net(batch).mean().backward()
    expected = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    net.zero_grad()
    pipeline = Pipeline(net, find_layers(net), [1] * stages, family, SingleProcess())
    pipeline.train(lambda _, part: net(part).mean(), list(batch.split(1)), [0.25] * 4)
    for parameter, value in zip(net.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, value)
