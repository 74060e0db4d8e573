"""Waits of the host and messages of the host in steady batches over NCCL, counted on the fake device (rehearsed)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_cuda.call import rehearse
from tests.support.fake_cuda.steady import Batch, steady_world

pytestmark = pytest.mark.rehearsed

MOST = 4
"""Waits of a batch without clipping and mixed precision; `docs/how_it_works.md` names each."""
TO_HOST = "lightning_pipe/trainer/whole_model/logging.py to_host: copy to the host"
NORM = "lightning_pipe/trainer/whole_model/gradient_norms.py _of_all: read a value"


def steady(micro_batches: int = 4, **trainer: Any) -> list[Batch]:
    """The first process has the loss."""
    strategy = {"process_group_backend": "nccl", "schedule": "1f1b", "micro_batches": micro_batches}
    return rehearse(steady_world, strategy, trainer, devices=2, timeout=100)


def test_waits_do_not_grow_with_micro_batches_or_logged_values() -> None:
    few, many = steady(4), steady(8)
    for found in (few, many):
        # the losses and what is logged, in one transfer each
        assert found[0].waits == {TO_HOST: 2}
        assert found[1].waits == {}
    assert sum(few[0].waits.values()) <= MOST


@pytest.mark.slow
def test_clipping_reads_one_norm() -> None:
    loss, other = steady(gradient_clip_val=0.5)
    assert loss.waits == {TO_HOST: 2, NORM: 1}
    assert other.waits == {NORM: 1}


@pytest.mark.slow
def test_a_scaler_reads_its_factor_and_what_overflowed() -> None:
    for found in steady(precision="16-mixed"):
        own = {place: count for place, count in found.waits.items() if place != TO_HOST}
        assert sum(own.values()) <= 3, own
