"""The order of streams and memory over NCCL, as torch's detector of races sees it on the fake device (rehearsed)."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_pipe.transport.arrangement import open_transport
from lightning_pipe.transport.base import Channel, Lane
from lightning_pipe.transport.topology import Topology
from tests.support import processes
from tests.support.equality_sweep import Point
from tests.support.fake_cuda.call import rehearse

pytestmark = pytest.mark.rehearsed

FORWARD = Lane("forward")
REAL = (
    ("residual", Point("1f1b", 2, 4)),
    ("skips", Point("chimera", 2, 4)),
    ("tied_to_layers", Point("zero_bubble", 2, 4)),
    ("residual", Point("1f1b", 1, 3, replicas=2)),
)


def one_message(process: int, planted: str) -> list[str]:
    """Rank 0 sends one message to rank 1; one of them does not wait as it must."""
    from tests.support.fake_cuda.order import watching

    torch.cuda.set_device(process)
    transport = open_transport(Topology(2), torch.device("cuda", process), timedelta(seconds=20))
    transport.connect([Channel(0, 1, FORWARD)])
    with watching() as order:
        if process == 0:
            data = torch.ones(64, dtype=torch.uint8, device=transport.device)
            work: Any = transport.send(data, 1, FORWARD)
            del data
            if planted == "early free":
                work._held = None
                time.sleep(0.5)
            work.wait()
        else:
            data = torch.empty(64, dtype=torch.uint8, device=transport.device)
            work = transport.receive(data, 0, FORWARD)
            if planted != "missing wait":
                work.wait()
            data + 1
            work.wait()
            del data
        del work
    transport.barrier()
    transport.close()
    return order.errors


def world(planted: str) -> list[list[str]]:
    return processes.run_world(one_message, 2, group_backend="nccl", planted=planted)


@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        ("nothing", [[], []]),
        ("early free", [["free after nccl send"], []]),
        ("missing wait", [[], ["aten::add after nccl receive"]]),
    ],
)
def test_planted_mistakes_are_found(planted: str, expected: list[list[str]]) -> None:
    assert rehearse(world, planted) == expected


def trained(process: int, name: str, point: Point) -> tuple[list[str], int]:
    from tests.gpu.over_processes import _train
    from tests.support.fake_cuda.order import watching

    with watching() as order:
        _train(process, name, point, True, None)
    return order.errors, order.launches


def training(name: str, point: Point) -> list[tuple[list[str], int]]:
    return processes.run_world(trained, 2, group_backend="nccl", timeout=80, name=name, point=point)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "point"), REAL, ids=lambda value: str(value))
def test_nothing_is_touched_out_of_order_while_training(name: str, point: Point) -> None:
    for errors, launches in rehearse(training, name, point):
        assert errors == []
        assert launches > 100
