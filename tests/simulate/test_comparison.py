"""All schedules in one table: the same model, with times, memory and messages."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest

from lightning_pipe import schedules
from lightning_pipe.errors import ScheduleError
from lightning_pipe.simulate import Comparison, Costs, compare, simulate, table
from lightning_pipe.simulate.style import percent


@cache
def rows_of(**arguments: object) -> dict[str, Comparison]:
    return {row.label: row for row in compare(**{"ranks": 4, "micro_batches": 8, **arguments})}  # type: ignore[arg-type]


def test_every_schedule_and_variant_has_a_row() -> None:
    rows = rows_of()
    assert {label.split()[0] for label in rows} == set(schedules.names())
    assert {"zero_bubble variant=v", "chimera scaling=backward_halving"} <= rows.keys()


def test_schedules_are_compared_on_the_same_model() -> None:
    """Whatever the number of stages, all work takes as long; interleaved gains, the wasteful ones lose."""
    rows = rows_of()
    whole = 4 * 8 * 3
    for row in rows.values():
        assert row.timeline is not None
        recomputed = 4 * 8 if "doubling" in row.label else 0
        assert sum(row.timeline.busy) == whole + recomputed
    assert rows["1f1b"].bubble_ratio == Fraction(3, 11)
    assert rows["1f1b"].time == 33
    assert rows["interleaved"].time == 24 + Fraction(24 * 3, 2 * 8)
    assert rows["interleaved"].activations == Fraction(11, 2)
    assert rows["gems"].time == simulate(schedules.GEMS().build(4, 8)).makespan
    assert (rows["pipedream"].bubble_ratio, rows["pipedream"].time) == (0, 24)


def test_weights_and_messages() -> None:
    rows = rows_of()
    weights = {label: row.weights for label, row in rows.items()}
    assert weights["gpipe"] == weights["interleaved"] == weights["zero_bubble variant=v"] == 1
    assert weights["chimera"] == weights["gems"] == weights["pipedream_2bw"] == 2
    assert weights["pipedream"] == 4
    assert rows["gpipe"].messages == 2 * 3 * 8
    assert rows["interleaved"].messages == 2 * 7 * 8
    assert rows["zero_bubble variant=v"].messages == 2 * 6 * 8


def test_a_given_number_of_stages_and_recomputation() -> None:
    rows = rows_of(stages=8, costs=Costs((1,) * 8, (2,) * 8), recompute="always")
    assert {row.schedule.stages for row in rows.values() if row.schedule} == {8}
    # The last rank never idles, so all its recomputation counts, of all but the activations that are used at once; of
    # the other three only the lower stage's, once.
    assert rows["gpipe"].time == 2 * 33 + 2 * 8 + 2


def test_what_cannot_be_built_says_why() -> None:
    rows = rows_of(ranks=3, micro_batches=5)
    assert rows["chimera"].schedule is None
    assert "got pipes=2 and ranks=3" in rows["chimera"].problem
    text = table(rows.values())
    assert "\nchimera: Chimera needs pipes to divide" in text
    assert text.splitlines()[0].split() == [
        "schedule",
        "stages",
        "time",
        "bubble",
        "activations",
        "weights",
        "messages",
    ]


def test_costs_by_stage_need_a_number_of_stages() -> None:
    with pytest.raises(ScheduleError, match="different numbers of stages"):
        compare(4, 8, costs=Costs(forward=[1, 1, 1, 1]))


def test_the_table_of_the_docs_has_these_bubbles() -> None:
    text = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
    rows = dict(re.findall(r'^\| `"(\w+)"`[^|]*\|[^|]*\| ([\d.]+ %) \|', text, re.MULTILINE))
    assert {schedules.get(name).name for name in rows} == set(schedules.names())
    assert {"vhalf", "vmin", "zero_bubble_v"} <= set(rows)
    for name, bubble in rows.items():
        timeline = simulate(schedules.get(name).build(4, 8))
        assert bubble == percent(timeline.bubble_ratio if timeline.synchronous else 0), name
