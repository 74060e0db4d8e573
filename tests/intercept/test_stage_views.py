"""Each stage of a rank sees in the layers of others what its own runs have left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.layer_calls import RunCache
from lightning_pipe.intercept.stage_views import StageViews
from lightning_pipe.intercept.state_reads import Course, StateReads


class Rank:
    """A rank with two stages of one layer each.

    Args:
        pipes: whether several pipes share the micro-batches.
    """

    def __init__(self, *, pipes: bool = False) -> None:
        self.layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        for layer in self.layers:
            layer.scale, layer.table = 1.0, {"gain": 1.0}
        self.cache = RunCache()
        names = [(str(number), layer) for number, layer in enumerate(self.layers)]
        self.cache.reads = StateReads(names, Course((range(1), range(1, 2)), in_order=False, one_pipe=not pipes))
        self.views = StageViews(self.cache, self.layers.children)

    @contextmanager
    def run(self, stage: int) -> Iterator[None]:
        calls = SimpleNamespace(ran=[self.layers[stage]])
        run: Any = SimpleNamespace(
            stage=SimpleNamespace(stage=stage, last=False),
            training=True,
            repeats=False,
            layer_calls=calls,
            tracker=SimpleNamespace(alone=False),
        )
        with self.views.apart(run):
            yield

    def scale(self, stage: int, factor: float) -> list[float]:
        """A run that changes both layers by their own values. Returns what it makes of them."""
        with self.run(stage):
            for layer in self.layers:
                self.views.note_set(layer, "scale")
                layer.scale *= factor
                layer.table["gain"] *= factor
            return [value for layer in self.layers for value in (layer.scale, layer.table["gain"])]


def values(rank: Rank) -> list[float]:
    return [layer.scale for layer in rank.layers]


def test_each_stage_goes_on_from_what_its_own_runs_have_left() -> None:
    rank = Rank()
    for expected in (0.5, 0.25):
        assert rank.scale(0, 0.5) == [expected] * 4
        assert values(rank) == [expected, 1.0]
    # the other stage begins with what there was before the batch
    assert rank.scale(1, 0.5) == [0.5] * 4
    assert rank.scale(0, 0.5) == [0.125] * 4
    assert rank.scale(1, 0.5) == [0.25] * 4
    assert values(rank) == [0.125, 0.25]


def test_what_is_set_for_all_ranks_is_what_all_stages_see() -> None:
    rank = Rank()
    rank.scale(0, 0.5)
    rank.views.forget(rank.layers[1], "scale")
    rank.layers[1].scale = 3.0
    assert rank.scale(0, 0.5) == [0.25, 0.25, 1.5, 0.25]
    with rank.views.of_batch():
        assert rank.scale(0, 0.5) == [0.125, 0.125, 1.5, 0.5]


def test_what_a_run_is_the_first_to_set_is_known_as_it_was() -> None:
    rank = Rank()
    with rank.views.seen_first() as new:
        rank.scale(0, 0.5)
        rank.scale(0, 0.5)
    for before in new:
        before.undo()
    assert values(rank) == [1.0, 1.0]


def test_what_calls_change_is_left_alone() -> None:
    rank = Rank()
    rank.scale(0, 0.5)
    rank.cache.changing(rank.layers[1], "scale")
    assert rank.scale(0, 0.5)[2] == 0.5


def test_of_several_pipes_none_may_change_in_place_by_the_own_value() -> None:
    rank = Rank(pipes=True)
    rank.scale(0, 0.5)
    with pytest.raises(CutError, match=r"the step changes `self\.[01]\.table` by its own value"):
        rank.scale(1, 0.5)
