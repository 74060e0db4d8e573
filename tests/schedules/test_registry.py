"""Schedules by name, by function, by class and by file."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_pipe import schedules
from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules import (
    Action,
    Family,
    GPipe,
    Interleaved,
    Kind,
    OneFOneB,
    ZeroBubble,
    get,
    register,
    registry,
)
from lightning_pipe.schedules.family import Orders


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_families", dict(registry._families))


def all_forwards_first(ranks: int, micro_batches: int, reverse: bool = False) -> Orders:
    indices = range(micro_batches)[::-1] if reverse else range(micro_batches)
    return [
        [Action(Kind.FORWARD, rank, i) for i in range(micro_batches)]
        + [Action(Kind.BACKWARD, rank, i) for i in indices]
        for rank in range(ranks)
    ]


def test_names_lead_to_families() -> None:
    assert get("gpipe") == GPipe()
    assert get("GPipe") == GPipe()
    assert get("interleaved", virtual_stages=3) == Interleaved(virtual_stages=3)
    assert get(Interleaved(3)) == Interleaved(3)
    assert {"naive", "gpipe", "1f1b", "interleaved"} <= set(schedules.names())


@pytest.mark.parametrize(("name", "nearest"), [("1f2b", "1f1b"), ("g-pipe", "gpipe"), ("interleave", "interleaved")])
def test_an_unknown_name_gets_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ScheduleError, match=f"Did you mean '{nearest}'"):
        get(name)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("dapple", "1f1b"),
        ("pipedream_flush", "1f1b"),
        ("1F1B_flush", "1f1b"),
        ("f_then_b", "gpipe"),
        ("virtual_pipeline", "interleaved"),
        ("interleaved_1f1b", "interleaved"),
        ("LoopedBFS", "looped_bfs"),
        ("InterleavedZeroBubble", "interleaved_zero_bubble"),
    ],
)
def test_names_of_other_packages_lead_to_the_same_families(alias: str, name: str) -> None:
    assert get(alias) == get(name)
    assert get(alias).name == name


@pytest.mark.parametrize(
    ("alias", "variant"), [("zero_bubble_v", "v"), ("ZBVZeroBubble", "v"), ("vhalf", "v_half"), ("VMin", "v_min")]
)
def test_an_alias_may_stand_for_options(alias: str, variant: Any) -> None:
    assert get(alias) == get(alias, variant=variant) == ZeroBubble(variant)
    with pytest.raises(
        ScheduleError, match=f"with variant='{variant}', got variant='h2'.\nHint: Use schedule='zero_bub"
    ):
        get(alias, variant="h2")


def test_an_alias_takes_options_and_gives_way_to_a_schedule_of_that_name() -> None:
    assert get("virtual_pipeline", virtual_stages=3) == Interleaved(virtual_stages=3)
    with pytest.raises(ScheduleError, match="Did you mean 'pipedream_flush'"):
        get("pipedream_flsh")
    register("dapple")(all_forwards_first)
    assert get("dapple").name == "dapple"


def test_unknown_names_and_options_say_what_there_is() -> None:
    with pytest.raises(ScheduleError, match="known are 'naive', 'gpipe'"):
        get("zzzz")
    with pytest.raises(ScheduleError, match=r"'gpipe' has no option 'chunks'\.\nHint: It has no options\."):
        get("gpipe", chunks=2)
    with pytest.raises(
        ScheduleError, match=r"no option 'pips'\.\nHint: Did you mean pipes\? It has pipes, scaling, sync"
    ):
        get("chimera", pips=2)


@pytest.mark.parametrize("count", [1.5, 2.0, 0, -1, "2", float("nan")])
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("interleaved", "virtual_stages"),
        ("looped_bfs", "virtual_stages"),
        ("interleaved_zero_bubble", "virtual_stages"),
        ("chimera", "pipes"),
        ("pipedream_2bw", "accumulate"),
    ],
)
def test_counts_are_whole_numbers(name: str, option: str, count: Any) -> None:
    with pytest.raises(
        ScheduleError, match=f"whole number >= 1, got {option}={count!r}.\nHint: Use {option}=1 or more"
    ):
        get(name, **{option: count})


@pytest.mark.parametrize("count", [1.5, 0, "2"])
@pytest.mark.parametrize("what", ["ranks", "micro_batches", "stages"])
def test_sizes_are_whole_numbers(what: str, count: Any) -> None:
    with pytest.raises(ScheduleError, match=f"'1f1b' needs {what} to be a whole number >= 1, got {what}={count!r}"):
        OneFOneB().build(**{"ranks": 2, "micro_batches": 4, "stages": 2, what: count})


@pytest.mark.parametrize("name", ["bogus", "zigzag"])
def test_a_name_like_no_other_gets_no_suggestion(name: str) -> None:
    with pytest.raises(ScheduleError, match="Use one of these") as caught:
        get(name)
    assert "Did you mean" not in str(caught.value)


def test_a_function_becomes_a_schedule() -> None:
    register("mine")(all_forwards_first)
    schedule = get("mine").build(ranks=2, micro_batches=2, stages=3)
    assert schedule.name == "mine"
    assert " ".join(map(str, schedule.actions[0])) == "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"
    assert get("mine", reverse=True).build(2, 2).actions == GPipe().build(2, 2).actions


def test_a_class_becomes_a_schedule() -> None:
    @register("reversible")
    @dataclass(frozen=True)
    class Mine(Family):
        name = "reversible"
        reverse: bool = True

        def orders(self, ranks: int, micro_batches: int) -> Orders:
            return all_forwards_first(ranks, micro_batches, self.reverse)

    schedule = get("reversible").build(2, 2)
    assert (schedule.name, schedule.options) == ("reversible", {"reverse": True})
    assert schedule.actions == GPipe().build(2, 2).actions


def test_a_broken_schedule_of_a_user_is_refused() -> None:
    register("broken")(lambda ranks, micro_batches: [order[::-1] for order in all_forwards_first(ranks, micro_batches)])
    with pytest.raises(ScheduleError, match=r"'broken', row 0, action 0 \(0B1\): F of micro-batch 1"):
        get("broken").build(2, 2)


def test_a_finished_schedule_and_a_file_are_families_too(tmp_path: Path) -> None:
    schedule = OneFOneB().build(ranks=2, micro_batches=4)
    schedule.to_csv(tmp_path / "own.csv")
    for family in (get(schedule), get(tmp_path / "own.csv"), get(str(tmp_path / "own.csv"))):
        assert family.build(ranks=2, micro_batches=4).actions == schedule.actions
        assert family.build(ranks=2, micro_batches=4, stages=5).stages == 5
        with pytest.warns(UserWarning, match="in the order for 4, cut short"):
            assert family.build(ranks=2, micro_batches=3).placement == schedule.placement
        with pytest.raises(ScheduleError, match="made for 2 ranks, got ranks=3"):
            family.build(ranks=3, micro_batches=4)
        with pytest.raises(ScheduleError, match="made for 2 stages, got stages=1"):
            family.build(ranks=2, micro_batches=4, stages=1)


def test_importing_schedules_needs_nothing_heavy() -> None:
    program = "import sys, lightning_pipe.schedules, lightning_pipe.simulate, lightning_pipe.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "lightning", "numpy", "matplotlib", "pytorch_lightning"} & set(loaded)


def test_who_chooses_a_schedule_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"no schedule 'auto'(?s:.*)lightning-pipe search(?s:.*)'1f1b'"):
        schedules.get("auto")
