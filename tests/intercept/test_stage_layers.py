"""Which layers a stage runs, and how the calls of a run are numbered."""

from __future__ import annotations

import pytest

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.stage_layers import CallNumbers, StageLayers

NAMES = ("embed", "0", "1", "head")


def test_a_stage_knows_its_place() -> None:
    first, last = StageLayers(0, range(2), NAMES, {}), StageLayers(1, range(2, 4), NAMES, {})
    assert (first.next_name, first.last, first.all) == ("1", False, False)
    assert last.last
    assert StageLayers(0, range(4), NAMES, {}).all


def test_every_call_of_a_layer_has_a_random_stream_of_its_own() -> None:
    numbers = CallNumbers(StageLayers(0, range(2), NAMES, {}))
    assert [numbers.next(layer) for layer in (0, 1, 1, 2)] == [(0, (0, 0)), (1, (1, 0)), (1, (1, 1)), (2, (2, 0))]


def test_a_second_pass_counts_on() -> None:
    stage = StageLayers(0, range(2), NAMES * 2, {}, stage_of=(0, 0, 1, 1))
    numbers = CallNumbers(stage)
    assert [numbers.next(layer)[0] for layer in (0, 2, 3, 0, 2)] == [0, 2, 3, 4, 6]
    with pytest.raises(CutError, match="'embed' is called in one pass more than the 2"):
        numbers.next(0)
