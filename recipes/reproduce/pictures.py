"""Pictures for the page: values of here beside the published ones, on the same axes, as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from math import ceil, floor, log2
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.reproduce.results import Picture

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C", "#7F3C8D")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<")
# Text as paths looks the same everywhere, and needs no font of the reader's; the salt keeps ids the same.
STYLE: Any = {"svg.fonttype": "path", "svg.hashsalt": "recipes", "font.size": 9}
Points = Mapping[str, Sequence[tuple[float, float]]]
"""For every label points (x, y)."""


@rc_context(STYLE)
def lines(
    published: Points,
    ours: Points,
    axes: tuple[str, str],
    *,
    logarithmic: bool = False,
    size: tuple[float, float] = (8.2, 4.4),
) -> Figure:
    """Curves over a number: published points large and empty, ours small, filled and joined.

    Args:
        published: by label.
        ours: by the same labels, or by others.
        axes: what is along x and y, with units.
        logarithmic: x and y grow by factors.
        size: width and height in inches.
    """
    figure, plot = _figure(size)
    for index, label in enumerate(dict.fromkeys([*published, *ours])):
        style: Any = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        if label in published:
            empty: Any = {"linestyle": "none", "markerfacecolor": "none", "markersize": 9}
            plot.plot(*zip(*published[label], strict=True), **empty, **style)
        if label in ours:
            plot.plot(*zip(*ours[label], strict=True), linewidth=1.4, markersize=4.5, **style)
        plot.plot([], [], label=label, **style)
    every = [point for points in (*published.values(), *ours.values()) for point in points]
    if logarithmic:
        plot.set_xscale("log", base=2)
        plot.set_yscale("log", base=2)
        low, *_, high = sorted(y for _, y in every)
        powers = [2**power for power in range(floor(log2(low)), ceil(log2(high)) + 1)]  # no scientific notation
        plot.set_yticks(powers, [f"{tick:,g}" for tick in powers])
    else:
        plot.set_ylim(bottom=0)
    ticks = sorted({x for x, _ in every})
    plot.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
    plot.minorticks_off()
    _finish(figure, plot, axes, published=bool(published))
    return figure


@rc_context(STYLE)
def bars(
    title: str, published: Mapping[str, float | None], ours: Mapping[str, float], unit: str, caption: str
) -> Picture:
    """A pair of bars for each label: published above, ours below.

    Args:
        title: above it.
        published: by label; ``None`` where the paper has no value.
        ours: by label.
        unit: of the values, along x.
        caption: below it.
    """
    figure, plot = _figure((8.2, 1.4 + 0.34 * len(ours)))
    places = range(len(ours))
    given = [published.get(label) or 0.0 for label in ours]
    plot.barh([place - 0.2 for place in places], given, 0.38, color="#BBBBBB", label="published")
    plot.barh([place + 0.2 for place in places], list(ours.values()), 0.38, color=COLOURS[0], label="simulated")
    plot.set_yticks(list(places), list(ours))
    plot.set_ylim(len(ours) - 0.4, -0.6)
    plot.set_xlabel(unit)
    plot.grid(axis="x", color="#E5E5E5")
    plot.set_axisbelow(True)
    plot.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return picture(title, figure, caption)


def _figure(size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.add_subplot()


@rc_context(STYLE)
def picture(title: str, figure: Figure, caption: str) -> Picture:
    """What is drawn, as SVG without XML head, the same each time.

    Args:
        title: above it.
        figure: what is drawn.
        caption: below it.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    return Picture(title, svg, caption)


def _finish(figure: Figure, plot: Axes, axes: tuple[str, str], published: bool) -> None:
    plot.set_xlabel(axes[0])
    plot.set_ylabel(axes[1])
    plot.grid(color="#E5E5E5")
    plot.spines[["top", "right"]].set_visible(False)
    if published:
        plot.plot([], [], color="#555555", marker="o", linestyle="none", markerfacecolor="none", label="published")
        plot.plot([], [], color="#555555", marker="o", markersize=4.5, label="simulated")
    figure.legend(loc="outside right upper", frameon=False)
