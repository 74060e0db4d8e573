"""Schedules without a flush against the closed forms of their papers, computed in one process from the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_pipe.schedules import PipeDream, PipeDream2BW
from tests.pipeline.flow import (
    Net,
    adam,
    assert_same,
    batches,
    closed_form,
    pipedream,
    pipelined,
    sgd,
    two_versions,
    vertical,
)


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


DRAINS = [(), (9,), (2, 3, 17)]


@pytest.mark.parametrize("drains", DRAINS, ids=str)
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_pipedream(ranks: int, optimizer: Any, drains: tuple[int, ...]) -> None:
    model = Net()
    found = pipelined(model, batches(), ranks, PipeDream(), optimizer, drains=drains)
    assert_same(found, closed_form(model, batches(), ranks, pipedream(ranks), optimizer, drains=drains))


@pytest.mark.parametrize("drains", DRAINS[:2], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_vertical_sync(ranks: int, drains: tuple[int, ...]) -> None:
    model = Net()
    found = pipelined(model, batches(), ranks, PipeDream(vertical_sync=True), drains=drains)
    assert_same(found, closed_form(model, batches(), ranks, vertical(ranks), sgd, drains=drains))


@pytest.mark.parametrize("drains", DRAINS, ids=str)
@pytest.mark.parametrize("size", [4, 6, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_2bw(ranks: int, size: int, drains: tuple[int, ...]) -> None:
    model, optimizer = Net(), adam if size == 4 else sgd
    found = pipelined(model, batches(), ranks, PipeDream2BW(size), optimizer, micro_batches=size, drains=drains)
    assert_same(
        found,
        closed_form(model, batches(), ranks, two_versions, optimizer, micro_batches=size, drains=drains),
    )


def test_pipedream_is_not_sgd_nor_vertical_sync() -> None:
    model = Net()
    plain, stashed, synced = (
        closed_form(model, batches(), 4, version, sgd).values["head.weight"]
        for version in (lambda stage, t: t, pipedream(4), vertical(4))
    )
    for one, other in ((plain, stashed), (plain, synced), (stashed, synced)):
        assert float((one - other).abs().max()) > 1e-4
