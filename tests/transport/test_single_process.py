"""One process that holds all stages needs nobody."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_pipe.errors import CommunicationError
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
