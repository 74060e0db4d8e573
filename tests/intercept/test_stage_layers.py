"""Which layers a stage runs, and how the calls of a run are numbered."""

from __future__ import annotations

import pytest

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.stage_layers import CallNumbers, StageLayers

NAMES = ("embed", "0", "1", "head")


def test_a_stage_knows_its_place() -> None:
    first, last = StageLayers(0, range(2), NAMES, {}), StageLayers(1, range(2, 4), NAMES, {})
    assert (first.first_name, first.next_name, first.last, first.all) == ("embed", "1", False, False)
    assert (last.first_name, last.last) == ("1", True)
    assert StageLayers(0, range(4), NAMES, {}).all


def test_every_call_of_a_layer_has_a_random_stream_of_its_own() -> None:
    numbers = CallNumbers(StageLayers(0, range(2), NAMES, {}))
    assert [numbers.next(layer) for layer in (0, 1, 1, 2)] == [(0, 0), (1, 1), (1, 5), (2, 2)]


def test_a_second_pass_counts_on() -> None:
    stage = StageLayers(0, range(2), NAMES * 2, {}, stage_of=(0, 0, 1, 1))
    numbers = CallNumbers(stage)
    assert stage.in_one_pass == 4
    assert [numbers.next(layer)[0] for layer in (0, 2, 3, 0, 2)] == [0, 2, 3, 4, 6]
    with pytest.raises(CutError, match="'embed' is called in one pass more than the 2"):
        numbers.next(0)


def test_which_parameters_belong_to_earlier_stages_alone() -> None:
    stage = StageLayers(1, range(1, 2), ["layers.1", "layers.10", "layers.2"], {})
    names = ["layers.1.weight", "layers.10.weight", "layers.2.weight", "head.weight"]
    assert [stage.is_behind(name) for name in names] == [True, False, False, False]
    again = StageLayers(2, range(2, 3), ["a", "b", "a", "b"], {}, (0, 1))
    assert not any(again.is_behind(f"{name}.weight") for name in "ab")
