"""Draws the pictures of README and docs: ``python -m docs.pictures`` (or ``make pictures``)."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.transforms import Bbox

from lightning_pipe import schedules, simulate
from lightning_pipe.schedules import Kind
from lightning_pipe.simulate import compare
from lightning_pipe.simulate.style import COLOURS
from recipes.reproduce.experiments import load
from recipes.reproduce.pictures import lines

FOLDER = Path(__file__).parents[1] / ".github" / "pictures"
SCHEDULES = ("1f1b", "gpipe", "interleaved", "chimera", "zero_bubble")
DARK, GREY = "#1A1A1A", "#8C8C8C"


def main() -> None:
    """Draw all of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in SCHEDULES:
        simulate(schedules.get(name).build(ranks=4, micro_batches=8)).plot(FOLDER / f"{name}.png")
    trade(FOLDER / "memory_and_bubble.png", ranks=8, micro_batches=16)
    idea(FOLDER / "idea.png")
    reproduced(FOLDER / "reproduced.png")


def trade(path: Path, ranks: int, micro_batches: int) -> None:
    """The bubble of every schedule with a flush against the activations that a rank holds."""
    figure = Figure(figsize=(8.6, 4.6), layout="constrained")
    axes = figure.add_subplot()
    labels: dict[tuple[float, float], list[str]] = {}
    for row in compare(ranks, micro_batches):
        if row.schedule is not None and row.schedule.synchronous:
            point = float(row.activations), 100 * float(row.bubble_ratio)
            labels.setdefault(point, []).append(re.sub(r" \w+=", " ", row.label))
            filled = COLOURS[Kind.FORWARD] if row.weights == 1 else "none"
            axes.plot(*point, "o", markersize=7, color=COLOURS[Kind.FORWARD], markerfacecolor=filled)
    axes.set_yscale("log")
    ticks = (5, 10, 20, 40, 80)
    axes.set_yticks(ticks, [f"{tick} %" for tick in ticks])
    axes.minorticks_off()
    axes.set_xticks(range(0, micro_batches + 1, 4))
    axes.set_xlim(0, 1.3 * micro_batches)
    axes.set_xlabel(f"activations, in micro-batches on 1/{ranks} of the model")
    axes.set_ylabel("bubble")
    axes.set_title(f"{ranks} ranks, {micro_batches} micro-batches; empty: two copies of the weights", fontsize=10)
    figure.draw_without_rendering()  # from here on the axes are where they stay
    taken = [Bbox.from_extents(*(at - 4), *(at + 4)) for at in map(axes.transData.transform, labels)]
    for point, names in sorted(labels.items()):
        taken.append(_labelled(axes, point, ", ".join(names), taken))
    figure.savefig(path, dpi=160)


def _labelled(axes: Axes, point: tuple[float, float], text: str, taken: list[Bbox]) -> Bbox:
    """Write beside a point, where nothing else is; returns where."""
    for offset, side in product((-2, -9, 6, -16, 13), ("left", "right")):
        place = (6 if side == "left" else -6, offset)
        label = axes.annotate(text, point, place, textcoords="offset points", ha=side, fontsize=8, color=DARK)
        box = label.get_window_extent()
        if not box.count_overlaps(taken) and axes.bbox.x0 < box.x0 and box.x1 < axes.bbox.x1:
            return box
        label.remove()
    raise RuntimeError(f"{text!r} has no place in the picture.")


def reproduced(path: Path) -> None:
    """Chimera's Figure 14 beside the simulator, as ``python -m recipes.reproduce chimera_figure14`` has it."""
    points: tuple[dict[str, list[tuple[float, float]]], ...] = ({}, {})
    for row in load("chimera_figure14").reproduce().rows:
        name, _, nodes = row.what.partition(", ")
        if row.unit:
            for of_row, value in zip(points, (row.published, row.reproduced), strict=True):
                of_row.setdefault(name, []).append((int(nodes.split()[0]), float(str(value))))
    axes = ("nodes with a P100 each", "Bert-48, sequences per second")
    lines(*points, axes, logarithmic=True, size=(7.4, 3.3)).savefig(path, dpi=160)


def idea(path: Path) -> None:
    """Your step on two ranks: where each run begins and ends, what is computed, and what is sent."""
    figure = Figure(figsize=(8.0, 3.1), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 3.9)
    axes.axis("off")
    axes.text(0.05, 3.6, "your training_step, run by every rank for every micro-batch", fontsize=11, color=DARK)
    names = ("embed", "layer 0", "layer 1", "layer 2", "layer 3", "loss")
    for row, (rank, real) in enumerate((("rank 1\nstage 0", range(3)), ("rank 0\nstage 1", range(3, 6)))):
        y = 2.35 - 1.6 * row
        axes.text(0.05, y + 0.35, rank, fontsize=9, va="center", color=DARK)
        for index, name in enumerate(names):
            _box(axes, 1.2 + 1.48 * index, y, name, real=index in real, ended=row == 0 and index > 2)
    cut = 1.2 + 1.48 * 3 - 0.115
    axes.plot([cut, cut], [0.5, 3.25], color=COLOURS[Kind.BACKWARD_INPUT], linewidth=1.5, linestyle="--")
    arrow = {"arrowstyle": "-|>", "color": COLOURS[Kind.BACKWARD_INPUT], "linewidth": 1.5}
    axes.annotate("", (cut + 0.6, 1.5), (cut - 0.6, 2.3), arrowprops=arrow)
    sent = "the tensors that are\nalive here are sent"
    axes.text(cut - 0.75, 1.9, sent, fontsize=9, ha="right", va="center", color=DARK)
    axes.text(cut + 0.9, 1.9, "gradients come back the same way", fontsize=9, va="center", color=DARK)
    axes.text(
        1.2, 0.3, "blue: computed    dashed: placeholders without values    empty: not reached", fontsize=9, color=GREY
    )
    figure.savefig(path, dpi=160)


def _box(axes: Axes, x: float, y: float, name: str, *, real: bool, ended: bool) -> None:
    style = {"facecolor": COLOURS[Kind.FORWARD], "edgecolor": "white"}
    if not real:
        style = {"facecolor": "white", "edgecolor": "#DDDDDD" if ended else GREY, "linestyle": "-" if ended else "--"}
    axes.add_patch(FancyBboxPatch((x, y), 1.25, 0.7, boxstyle="round,pad=0,rounding_size=0.08", **style))
    colour = DARK if real else "#CCCCCC" if ended else GREY
    axes.text(x + 0.625, y + 0.35, name, fontsize=9, ha="center", va="center", color=colour)


if __name__ == "__main__":
    main()
