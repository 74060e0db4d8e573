"""Drawings: golden grids as text, and that pictures say what the timeline says."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_pipe import schedules
from lightning_pipe.cli import main
from lightning_pipe.schedules import Kind
from lightning_pipe.simulate import Costs, Timeline, compare, simulate
from lightning_pipe.simulate.style import COLOURS, NAMES, summary
from lightning_pipe.simulate.terminal import draw
from tests.support.pairs import slow_but

GOLDEN = Path(__file__).parent / "golden"
DRAWN = (*schedules.names(), "zero_bubble_v", "vhalf", "vmin")
SIZES = {"naive": (3, 2), "gpipe": (4, 4), "1f1b": (4, 8), "interleaved": (4, 4)}


def timeline_of(name: str) -> Timeline:
    return simulate(schedules.get(name).build(*SIZES.get(name, (4, 8))))


@pytest.mark.parametrize("name", DRAWN)
def test_the_grid_is_the_golden_one(name: str) -> None:
    """After a wanted change: ``python -m tests.simulate.test_drawing`` writes the golden grids anew."""
    assert draw(timeline_of(name), width=200) + "\n" == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_grid_fits_the_width(width: int) -> None:
    timeline = simulate(schedules.get("1f1b").build(ranks=8, micro_batches=40))
    rows = [row for row in draw(timeline, width=width).splitlines()[1:-1] if row.startswith("stage")]
    assert len(rows) % 8 == 0
    assert all(len(row) <= width for row in rows)


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches"), [("gems", 8, 16), ("interleaved", 4, 8), ("chimera", 8, 8)]
)
def test_long_timelines_lose_no_micro_batch(name: str, ranks: int, micro_batches: int) -> None:
    schedule = schedules.get(name).build(ranks, micro_batches)
    drawn = draw(simulate(schedule), width=80)
    assert max(map(len, drawn.splitlines()[1:])) <= 80
    for row, actions in enumerate(schedule.actions):
        lines = drawn.splitlines()[1:-1]
        own = " ".join(line[len("stages 0 0") :] for line in lines[row :: ranks + 1])
        found = [word.rstrip("─") for word in own.split() if word[0].isdigit()]
        assert found == [f"{action.stage}{action.kind}{action.micro_batch}" for action in actions]


def test_very_long_timelines_are_one_block() -> None:
    drawn = draw(simulate(schedules.get("1f1b").build(4, 400)), width=80).splitlines()
    assert len(drawn) == 6
    assert all(len(row) <= 80 for row in drawn[1:-1])


def test_measured_times_are_drawn_to_scale() -> None:
    events = [(0, "F", 0, 0, 0, 5.0, 5.010), (0, "B", 0, 0, 0, 5.020, 5.040)]
    assert draw(Timeline.of(events, title="measured", unit="s"), width=40).splitlines() == [
        "measured: 1 rank, 1 micro-batch, bubble ratio 25.0 %",
        "stage 0  F0    B0───",
        "makespan 40 ms, activations held, row by row: 1",
    ]


def test_a_measured_row_has_the_rank_of_its_process() -> None:
    events = [(0, "F", 0, 0, 0, 0.0, 1.0), (1, "F", 1, 0, 0, 1.0, 2.0)]
    measured = Timeline.of(events, unit="s", global_ranks=(1, 0))
    assert [line[:15] for line in draw(measured, width=60).splitlines()[1:3]] == ["rank 1: stage 0", "rank 0: stage 1"]


@pytest.mark.parametrize("name", slow_but(["pipedream", "pipedream_2bw"], "pipedream"))
def test_without_a_flush_the_bubble_is_the_steady_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    timeline = timeline_of(name)
    assert summary(timeline).endswith("bubble ratio 27.3 % with filling and draining")
    row = next(row for row in compare(4, 8) if row.label == name)
    assert row.timeline is not None
    expected = "bubble ratio 0.0 % in the steady state, 27.3 % with filling and draining"
    assert summary(row.timeline).endswith(expected)
    main(["schedule", name])
    assert capsys.readouterr().out.splitlines()[0].endswith(expected)


@pytest.mark.parametrize(("name", "unit"), slow_but([("interleaved", ""), ("gpipe", "s")], ("gpipe", "s")))
def test_pictures(name: str, unit: str, tmp_path: Path) -> None:
    timeline = simulate(schedules.get(name).build(2, 4), Costs(0.01, 0.02, reduce=0.01))
    Timeline.of(timeline.events, unit=unit).plot(tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    timeline.plot(tmp_path / "x.svg")
    drawn = (tmp_path / "x.svg").read_text()
    # glyphs are paths; matplotlib writes each text beside them as a comment
    assert "<!-- stage 0 -->" in drawn or "<!-- stages 0 2 -->" in drawn
    assert f"<!-- {summary(timeline)} -->" in drawn


class Drawn:
    """What is drawn: shades of boxes by row, and the legend."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.boxes: list[tuple[float, float, str]] = []
        self.legend: dict[str, str] = {}
        monkeypatch.setattr(Axes, "broken_barh", self.box)
        monkeypatch.setattr(Figure, "legend", self.labels)

    def box(self, spans: list[tuple[float, float]], place: tuple[float, float], facecolors: str, **_: object) -> None:
        self.boxes.append((place[0], spans[0][0], facecolors))

    def labels(self, handles: list[Patch], **_: object) -> None:
        self.legend = {handle.get_label(): to_hex(handle.get_facecolor()) for handle in handles}


@pytest.mark.parametrize("name", slow_but(schedules.names(), "interleaved_zero_bubble"))
def test_the_legend_has_every_colour_that_is_drawn_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = Drawn(monkeypatch)
    timeline = timeline_of(name)
    timeline.plot(tmp_path / "x.svg")
    assert len(set(drawn.legend.values())) == len(drawn.legend)
    kinds = {event.kind for event in timeline.events if event.end > event.start}
    assert {label for label in drawn.legend if not label.startswith("lighter")} == {NAMES[kind] for kind in kinds}


def test_chimeras_second_pipe_is_light_in_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Drawn(monkeypatch)
    timeline = timeline_of("chimera")
    timeline.plot(tmp_path / "x.svg")
    strong = {COLOURS[kind].lower() for kind in (Kind.FORWARD, Kind.BACKWARD)}
    events = [event for row in timeline.compute for event in row]
    assert [(colour.lower() in strong) for *_, colour in drawn.boxes] == [event.pipe == 0 for event in events]
    assert "lighter: pipe 1" in drawn.legend


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches"), slow_but([("gems", 4, 8), ("interleaved", 4, 12)], ("gems", 4, 8))
)
def test_every_box_of_a_picture_has_its_number(
    name: str, ranks: int, micro_batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(Axes, "text", lambda self, x, y, text, **_: written.append(text))
    timeline = simulate(schedules.get(name).build(ranks, micro_batches))
    timeline.plot(tmp_path / "x.svg")
    assert written == [str(event.micro_batch) for row in timeline.compute for event in row]


if __name__ == "__main__":
    for each in DRAWN:
        (GOLDEN / f"{each}.txt").write_text(draw(timeline_of(each), width=200) + "\n")
