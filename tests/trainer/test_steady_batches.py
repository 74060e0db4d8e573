"""Waits of the host and messages of the host in steady batches over NCCL, counted on the fake device (rehearsed)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe import schedules
from lightning_pipe.engine import kept_words
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.arrangement import open_transport
from lightning_pipe.transport.topology import Topology
from tests.support import processes
from tests.support.fake_cuda.call import rehearse
from tests.support.fake_cuda.steady import Batch, steady_world

pytestmark = pytest.mark.rehearsed

MOST = 4
"""Waits of a batch without clipping and mixed precision; `docs/how_it_works.md` names each."""
MESSAGES = 4
"""Messages of the host of an end rank in a batch; `docs/how_it_works.md` names each."""
TO_HOST = "lightning_pipe/batches/outputs.py to_host: copy to the host"
NORM = "lightning_pipe/engine/whole_gradients.py gradient_norm: read a value"


def steady(micro_batches: int = 2, **trainer: Any) -> list[Batch]:
    """The first process has the loss."""
    strategy = {"process_group_backend": "nccl", "schedule": "1f1b", "micro_batches": micro_batches}
    return rehearse(steady_world, strategy, trainer, timeout=100)


def test_waits_and_messages_do_not_grow_with_micro_batches_or_logged_values() -> None:
    few, many = steady(), steady(4)
    for small, large in zip(few, many, strict=True):
        assert small.messages == large.messages
        # the batch, a word forward and one backward, the report
        assert sum(small.messages.values()) == MESSAGES
    for found in (few, many):
        # the losses and what is logged, in one transfer each
        assert found[0].waits == {TO_HOST: 2}
        assert found[1].waits == {}
    assert sum(few[0].waits.values()) <= MOST


def test_one_rank_waits_for_what_is_logged_alone() -> None:
    """Nobody else gets its losses, so they stay on the device."""
    strategy = {"schedule": "gpipe", "micro_batches": 2}
    (found,) = rehearse(steady_world, strategy, {}, ranks=1, timeout=100)
    assert found.waits == {TO_HOST: 1}


@pytest.mark.slow
def test_clipping_reads_one_norm() -> None:
    loss, other = steady(gradient_clip_val=0.5)
    assert loss.waits == {TO_HOST: 2, NORM: 1}
    assert other.waits == {NORM: 1}


@pytest.mark.slow
def test_a_scaler_reads_its_factor_and_what_overflowed() -> None:
    for found in steady(precision="16-mixed"):
        own = {place: count for place, count in found.waits.items() if place != TO_HOST}
        assert sum(own.values()) == 2, own


WIDTH = 4096
ROW = 4 * WIDTH
"""Bytes of what crosses the boundary for one sample."""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_memory_does_not_grow_with_micro_batches() -> None:
    """With 1F1B a rank holds messages for as many micro-batches as there are ranks, of one sample each here."""
    few, many = (crossings(micro_batches) for micro_batches in (4, 16))
    for small, large in zip(few, many, strict=True):
        assert large - small < 4 * ROW, (few, many)


def crossings(micro_batches: int) -> list[int]:
    """The most bytes of the device while each process trains micro-batches of one sample."""
    return rehearse(peaks, micro_batches, timeout=100)


def peaks(micro_batches: int) -> list[int]:
    return processes.run_world(peak, 2, group_backend="nccl", timeout=80, micro_batches=micro_batches)


def peak(process: int, micro_batches: int) -> int:
    """Two layers with few parameters and wide results: what counts is what crosses."""
    from tests.support.fake_cuda.device import native

    torch.cuda.set_device(process)
    place = torch.device("cuda", process)
    net = nn.Sequential(*[Wide() for _ in range(2)]).to(place)
    transport = open_transport(Topology(2), place, timedelta(seconds=20))
    pipeline = Pipeline(net, find_layers(net), [1, 1], schedules.get("1f1b"), transport)
    pipeline.partition()
    parts = list(torch.ones(micro_batches, 1, WIDTH, device=place).unbind())
    before, found = 0, []
    kept_words.ENOUGH = 0  # the last batches have no control words
    for _ in range(4):
        before = native.memory()[0]
        native.reset_peak()
        pipeline.train(lambda _, part: net(part).mean(), parts, [1 / micro_batches] * micro_batches)
        found.append(native.memory()[1] - before)
    transport.barrier()
    transport.close()
    return found[-1]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale
