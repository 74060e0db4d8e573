"""Pictures for the page: values of here beside the published ones, on the same axes, as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recipes.reproduce.results import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C", "#7F3C8D")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")
Points = Mapping[str, Sequence[tuple[float, float]]]
"""For every label points (x, y)."""


def lines(
    title: str,
    published: Points,
    ours: Points,
    axes: tuple[str, str],
    caption: str,
    *,
    logarithmic: bool = False,
) -> Picture:
    """Curves over a number; see `lines_figure`.

    Args:
        title: above it.
        published: by label.
        ours: by the same labels, or by others.
        axes: what is along x and y, with units.
        caption: below it.
        logarithmic: x and y grow by factors.
    """
    return Picture(title, svg(lambda: lines_figure(published, ours, axes, logarithmic=logarithmic)), caption)


def lines_figure(
    published: Points,
    ours: Points,
    axes: tuple[str, str],
    *,
    logarithmic: bool = False,
    size: tuple[float, float] = (8.2, 4.4),
) -> Figure:
    """Published points large and empty, ours small, filled and joined.

    Args:
        published: by label.
        ours: by the same labels, or by others.
        axes: what is along x and y, with units.
        logarithmic: x and y grow by factors.
        size: inches.
    """
    figure, plot = _figure(size)
    for index, label in enumerate(dict.fromkeys([*published, *ours])):
        style: Any = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        if label in published:
            plot.plot(*_columns(published[label]), linestyle="none", markerfacecolor="none", markersize=9, **style)
        if label in ours:
            plot.plot(*_columns(ours[label]), linewidth=1.4, markersize=4.5, **style)
        plot.plot([], [], label=label, **style)
    every = [*published.values(), *ours.values()]
    if logarithmic:
        plot.set_xscale("log", base=2)
        plot.set_yscale("log", base=2)
        _powers(plot, [y for points in every for _, y in points])
    else:
        plot.set_ylim(bottom=0)
    ticks = sorted({x for points in every for x, _ in points})
    plot.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
    plot.minorticks_off()
    _finish(figure, plot, axes, published=bool(published))
    return figure


def _powers(plot: Axes, values: Sequence[float]) -> None:
    """Ticks at powers of two in the place of scientific notation."""
    from math import ceil, floor, log2

    ticks = [2**power for power in range(floor(log2(min(values))), ceil(log2(max(values))) + 1)]
    plot.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])


def bars(
    title: str,
    published: Mapping[str, float | None],
    ours: Mapping[str, float],
    unit: str,
    caption: str,
    *,
    height: float | None = None,
) -> Picture:
    """A pair of bars for each label: published above, ours below.

    Args:
        title: above it.
        published: by label; ``None`` where the paper has no value.
        ours: by label.
        unit: of the values, along x.
        caption: below it.
        height: inches; by default enough for the labels.
    """

    def draw() -> Figure:
        figure, plot = _figure((8.2, height or 1.4 + 0.34 * len(ours)))
        places = range(len(ours))
        given = [published.get(label) or 0.0 for label in ours]
        plot.barh([place - 0.2 for place in places], given, 0.38, color="#BBBBBB", label="published")
        plot.barh([place + 0.2 for place in places], list(ours.values()), 0.38, color=COLOURS[0], label="reproduced")
        plot.set_yticks(list(places), list(ours))
        plot.set_ylim(len(ours) - 0.4, -0.6)
        plot.set_xlabel(unit)
        plot.grid(axis="x", color="#E5E5E5")
        plot.set_axisbelow(True)
        plot.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        return figure

    return Picture(title, svg(draw), caption)


def curves(
    title: str, values: Mapping[str, Sequence[float]], x: str, y: str, caption: str, *, mean_of: int = 1
) -> Picture:
    """Values by step.

    Args:
        title: above it.
        values: for each label, one value for each step.
        x: along x.
        y: along y, with unit.
        caption: below it.
        mean_of: steps that are averaged.
    """

    def draw() -> Figure:
        figure, plot = _figure((8.2, 4.4))
        for index, (label, each) in enumerate(values.items()):
            smooth = [sum(each[at - mean_of : at]) / mean_of for at in range(mean_of, len(each) + 1)]
            plot.plot(
                range(mean_of, len(each) + 1),
                smooth,
                label=label,
                linewidth=3.5 if index == 0 else 1.3,
                color="#BBBBBB" if index == 0 else COLOURS[(index - 1) % len(COLOURS)],
                linestyle="-" if index == 0 else (0, (4, 1 + 0.6 * index)),
            )
        _finish(figure, plot, (x, y), published=False)
        return figure

    return Picture(title, svg(draw), caption)


def svg(draw: Callable[[], Figure]) -> str:
    """What is drawn, as SVG without XML head, the same each time."""
    import matplotlib

    # Text as paths looks the same everywhere, and needs no font of the reader's; the salt keeps ids the same.
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "recipes", "font.size": 9}):
        buffer = io.StringIO()
        draw().savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)


def _figure(size: tuple[float, float]) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.add_subplot()


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _finish(figure: Figure, plot: Axes, axes: tuple[str, str], published: bool) -> None:
    plot.set_xlabel(axes[0])
    plot.set_ylabel(axes[1])
    plot.grid(color="#E5E5E5")
    plot.spines[["top", "right"]].set_visible(False)
    if published:
        plot.plot([], [], color="#555555", marker="o", linestyle="none", markerfacecolor="none", label="published")
        plot.plot([], [], color="#555555", marker="o", markersize=4.5, label="reproduced")
    figure.legend(loc="outside right upper", frameon=False)
