"""Batches of an evaluation that follow each other give what one device gives, whatever the ranks hold."""

from __future__ import annotations

import pytest
import torch

from lightning_pipe import schedules
from tests.support.equality_sweep import Point, streamed
from tests.support.model_zoo import ZOO
from tests.support.pairs import pairs

BATCHES = 6
POINTS = [
    Point("gpipe", 3),
    Point("interleaved", 4, ranks=2),
    Point("interleaved", 3, ranks=1),
    Point(schedules.ZeroBubble(variant="v"), 4),
    Point("dualpipev", 4),
    Point("chimera", 4, ranks=4),
    Point("gems", 2, ranks=2),
    Point("bitpipe", 4),
]


@pytest.mark.parametrize(
    ("model", "point"),
    pairs(
        ["residual", "skips", "tied_to_layers", "odd_batches"], POINTS, lambda model, point: (model + point) % 8 == 0
    ),
)
def test_batches_equal_one_device(model: str, point: Point) -> None:
    entry = ZOO[model]
    with torch.no_grad():
        module = entry.build()
        truth = [float(module.loss(batch)) for batch in entry.batches(BATCHES)]
    found, _ = streamed(entry, point, BATCHES, torch.no_grad)
    assert found == pytest.approx(truth, rel=1e-9)


def forwards(ran: list[list[str]]) -> list[str]:
    """What each process runs; process 0 has the last stage."""
    return [" ".join(action for action in each if action[1] == "F") for each in ran]


def test_batches_overlap() -> None:
    entry = ZOO["residual"]
    _, ran = streamed(entry, Point("interleaved", 4, ranks=2), 4, torch.no_grad)
    assert forwards(ran) == ["1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3", "0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3"]
    _, ran = streamed(entry, Point("dualpipev", 4), 4, torch.no_grad)
    assert forwards(ran) == ["0F0 0F1 0F2 3F0 0F3 3F1 3F2 3F3", "1F0 2F0 1F1 2F1 1F2 2F2 1F3 2F3"]
