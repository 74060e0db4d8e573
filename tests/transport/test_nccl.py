"""Both ways to move a GPU's tensors; NCCL needs one GPU per process."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from lightning_pipe.transport.arrangement import open_transport
from lightning_pipe.transport.base import Channel
from lightning_pipe.transport.topology import Topology
from tests.support import processes
from tests.transport.test_transports import BACKWARD, FORWARD, message

pytestmark = pytest.mark.gpu


def exchange(process: int) -> list[list[int]]:
    device = torch.device("cuda", process % torch.cuda.device_count())
    torch.cuda.set_device(device)
    transport = open_transport(Topology(2), device, timedelta(seconds=30))
    transport.connect([Channel(0, 1, FORWARD), Channel(1, 0, BACKWARD)])
    sizes = [(FORWARD, 5), (FORWARD, 5), (FORWARD, 5), (BACKWARD, 1 << 20)]
    # NCCL runs what is issued in this order: forward from rank 0 to rank 1, then backward the other way.
    mine = "forward" if transport.rank == 0 else "backward"
    sends, received = [], []
    for number, (lane, size) in enumerate(sizes):
        if lane.direction == mine:
            sends.append(transport.send(message(number, size).to(device), 1 - transport.rank, lane))
        else:
            data = torch.zeros(size, dtype=torch.uint8, device=device)
            transport.receive(data, 1 - transport.rank, lane).wait()
            received.append(data[:2].tolist())
    for work in sends:
        work.wait()
    total = torch.ones(4, device=device)
    transport.all_reduce(total, (0, 1)).wait()
    received.append(total.tolist())
    parts = [torch.full((2 + member,), 1.0 + process, device=device) for member in (0, 1)]
    transport.reduce_scatter(parts, (0, 1)).wait()
    received.append(parts[process].tolist())
    received.append([transport.broadcast_object(process, 1, (0, 1))])
    transport.barrier()
    transport.close()
    return received


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_messages_between_gpus(backend: str) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs one GPU per process")
    first, second = processes.run_world(exchange, 2, group_backend=backend, group_timeout=60, timeout=100)
    assert first == [[3, 3], [2.0] * 4, [3.0] * 2, [1]]
    assert second == [[0, 0], [1, 1], [2, 2], [2.0] * 4, [3.0] * 3, [1]]
