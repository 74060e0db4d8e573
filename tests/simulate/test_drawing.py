"""Drawings: golden grids as text, and that pictures and traces say what the timeline says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_pipe import schedules
from lightning_pipe.simulate import Costs, Timeline, simulate
from lightning_pipe.simulate.terminal import draw

GOLDEN = Path(__file__).parent / "golden"
SIZES = {"naive": (3, 2), "gpipe": (4, 4), "1f1b": (4, 8), "interleaved": (4, 4)}


def timeline_of(name: str) -> Timeline:
    return simulate(schedules.get(name).build(*SIZES.get(name, (4, 8))))


@pytest.mark.parametrize("name", schedules.names())
def test_the_grid_is_the_golden_one(name: str) -> None:
    """After a wanted change: ``python -m tests.simulate.test_drawing`` writes the golden grids anew."""
    assert draw(timeline_of(name), width=200) + "\n" == (GOLDEN / f"{name}.txt").read_text()


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = timeline_of("gpipe")
    assert "\x1b" not in str(timeline)
    assert "\x1b[38;5;16;48;5;117mF0\x1b[0m " in draw(timeline, colour=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in draw(timeline, colour=True)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_grid_fits_the_width(width: int) -> None:
    timeline = simulate(schedules.get("1f1b").build(ranks=8, micro_batches=40))
    rows = draw(timeline, width=width).splitlines()[1:-1]
    assert len(rows) == 8
    assert all(len(row) <= width for row in rows)


def test_measured_times_are_drawn_to_scale() -> None:
    events = [(0, "F", 0, 0, 0, 5.0, 5.010), (0, "B", 0, 0, 0, 5.020, 5.040)]
    assert draw(Timeline.of(events, title="measured", unit="s"), width=40).splitlines() == [
        "measured: 1 rank, 1 micro-batch, bubble ratio 25.0 %",
        "rank 0  F0    B0───",
        "makespan 40 ms, activations held per rank 1",
    ]


@pytest.mark.parametrize("name", ["interleaved", "gpipe"])
@pytest.mark.parametrize("unit", ["", "s"])
def test_pictures(name: str, unit: str, tmp_path: Path) -> None:
    timeline = simulate(schedules.get(name).build(2, 4), Costs(0.01, 0.02, reduce=0.01))
    Timeline.of(timeline.events, unit=unit).plot(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    timeline.plot(tmp_path / "x.svg")
    assert "bubble ratio" not in (tmp_path / "x.svg").read_text()[:200]


def test_the_title_of_a_picture_has_the_bubble_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    titles = []
    monkeypatch.setattr(Axes, "set_title", lambda self, title, **_: titles.append(title))
    timeline_of("1f1b").plot(tmp_path / "x.png")
    assert titles == ["1f1b: 4 ranks, 8 micro-batches, bubble ratio 27.3 %"]


def test_the_trace_has_a_slice_per_action_and_an_arrow_per_message(tmp_path: Path) -> None:
    timeline = simulate(schedules.get("1f1b").build(ranks=2, micro_batches=3), Costs(1, 2, reduce=1))
    timeline.to_chrome_trace(tmp_path / "x.json")
    content = json.loads((tmp_path / "x.json").read_text())
    events = content["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(timeline.events)
    first = next(event for event in slices if event["name"] == "1B0")
    assert (first["tid"], first["ts"], first["dur"]) == (1, 2000.0, 2000.0)
    assert first["args"] == {"stage": 1, "micro_batch": 0, "pipe": 0}
    assert sum(event["ph"] == "s" for event in events) == sum(event["ph"] == "f" for event in events) == 6
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} >= {"rank 0", "rank 1"}
    assert "bubble ratio" in content["otherData"]["title"]


if __name__ == "__main__":
    for each in schedules.names():
        (GOLDEN / f"{each}.txt").write_text(draw(timeline_of(each), width=200) + "\n")
