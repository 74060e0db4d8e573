"""The other throughputs of Chimera's evaluation under the cost model that Figure 13 has fitted: out of sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lightning_pipe.schedules import Chimera, Family
from lightning_pipe.simulate import Costs, simulate
from recipes.reproduce.bubbles import SCHEMES
from recipes.reproduce.memory import peaks
from recipes.reproduce.pictures import bars, lines
from recipes.reproduce.piz_daint import KNOWN, Machine, in_figure13, simulated
from recipes.reproduce.published import published
from recipes.reproduce.results import Picture, Result, Row, Tolerance

UNIT = "sequences/s"
DEVICE = 16.0
"""GB of a P100."""

BEYOND_MODEL = 1.45
"""What Figure 9's memory is over that of the memory model, in the middle of its range of 1.32 to 1.57."""

UNMODELLED = (
    "the four constants are those of Figure 13; Gloo's progress threads, overlap, and what a micro-batch or a sum "
    "takes however small it is are not in the model"
)


def recomputed(model: str, scheme: str, depth: int, batch: int, micro_batches: int) -> bool:
    """Whether activations do not fit into a P100, as far as the memory model tells."""
    if scheme == "GEMS":
        return False
    return BEYOND_MODEL * max(peaks(model, scheme, depth, batch, micro_batches)) > DEVICE


def figure10(machine: dict[str, float], nodes: int, total: int, tolerance: str) -> Result:
    """Bert-48: every scheme in every depth with every micro-batch.

    Args:
        machine: the constants of `Machine`.
        nodes: P100s.
        total: sequences of the mini-batch.
        tolerance: of the throughputs.
    """
    found: dict[str, dict[str, float]] = {}
    printed: dict[str, dict[str, float]] = {}
    for place, of_schemes in published("chimera", "Figure 10").items():
        width, depth = map(int, place[1:].split("D"))
        for scheme, bars_of in of_schemes.items():
            for label, speed in bars_of.items():
                batch = int(label[1:]) if label.startswith("B") else 0
                if batch and total % (width * batch) == 0:
                    printed.setdefault(scheme, {})[f"{place}{label}"] = speed
                    found.setdefault(scheme, {})[f"{place}{label}"] = _grid(
                        machine, scheme, "Bert-48", nodes, depth, batch, total
                    )
    return _tuning(printed, found, tolerance, "Figure 10", "Bert-48 on 32 nodes")


def figure11(machine: dict[str, float], nodes: int, total: int, tolerance: str) -> Result:
    """GPT-2: every scheme in every depth. The arguments are those of `figure10`."""
    found: dict[str, dict[str, float]] = {}
    printed: dict[str, dict[str, float]] = {}
    for scheme, bars_of in published("chimera", "Figure 11").items():
        for label, speed in bars_of.items():
            if "Bhat" not in label:
                depth, _, batch = label[1:].partition("B")
                printed.setdefault(scheme, {})[label] = speed
                found.setdefault(scheme, {})[label] = _grid(
                    machine, scheme, "GPT-2", nodes, int(depth), int(batch or 1), total
                )
    return _tuning(printed, found, tolerance, "Figure 11", "GPT-2 on 512 nodes")


def _grid(machine: dict[str, float], scheme: str, model: str, nodes: int, depth: int, batch: int, total: int) -> float:
    width = nodes // depth
    again = recomputed(model, scheme, depth, batch, total // (width * batch))
    return simulated(Machine(**machine), scheme, model, width, depth, batch, total, again)


def _tuning(
    printed: Mapping[str, Mapping[str, float]],
    found: Mapping[str, Mapping[str, float]],
    tolerance: str,
    figure: str,
    title: str,
) -> Result:
    rows = [
        Row(f"{scheme}, {label}", printed[scheme][label], speed, Tolerance(tolerance), UNIT, note=UNMODELLED)
        for scheme, speeds in found.items()
        for label, speed in speeds.items()
    ]
    pictures = []
    for scheme, speeds in found.items():
        best, own = (max(each[scheme], key=lambda label, each=each: each[scheme][label]) for each in (printed, found))  # type: ignore[misc]
        lost = 1 - printed[scheme][own] / printed[scheme][best]
        note = f"on the authors' machine {own} is {100 * lost:.0f} % slower than {best}"
        rows.append(Row(f"{scheme}: fastest set-up", best, own, Tolerance("exact"), note=note))
        caption = f"{figure} of Chimera, digitised, beside the simulator with the constants of Figure 13."
        name = f"{figure}: {scheme}, {title}"
        pictures.append(bars(name, printed[scheme], speeds, f"throughput ({UNIT})", caption))
    return Result.of(rows, *pictures)


def figure12(machine: dict[str, float], depth: int, batch: int, sequences: int, tolerance: str) -> Result:
    """Eager sums for the stages with idle time behind them, over eager sums for all.

    Args:
        machine: the constants of `Machine`.
        depth: stages.
        batch: sequences of a micro-batch.
        sequences: of the mini-batch, for each node.
        tolerance: of the gain.
    """
    constants, rows = Machine(**machine), []
    reason = "in the simulator a sum beside compute slows nothing down, which is what the figure shows of Gloo"
    for nodes, printed in published("chimera", "Figure 12").items():
        width = int(nodes) // depth
        costs = replace(
            constants.costs("Bert-48", depth, batch, recompute=False),
            reduce=constants.reductions("Bert-48", depth, 2 * width),
        )
        micro_batches = sequences * int(nodes) // (width * batch)
        eager, some = (
            float(simulate(Chimera(sync=way).build(depth, micro_batches), costs).makespan)
            for way in ("eager", "eager_opt")
        )
        what = f"eager-sync-opt over eager-sync, {nodes} nodes"
        rows.append(Row(what, printed, eager / some, Tolerance(tolerance), note=reason))
    return Result.of(rows)


def figure16(blocks: str, schemes: dict[str, list[int]], gpus: list[int], sequences: int, tolerance: str) -> Result:
    """Bert-48 with sequences of 512 on V100s, messages and sums free.

    Args:
        blocks: the published profile of a block, with sequences of 128.
        schemes: for each scheme depth, micro-batch, and whether recomputed.
        gpus: how many.
        sequences: of the mini-batch, for each GPU.
        tolerance: of Chimera's speed over the others'.
    """
    profile = published("chimera", blocks)
    times = {
        size: (forward / 1e3, backward / 1e3)
        for size, forward, backward in zip(profile["batch"], profile["forward_ms"], profile["backward_ms"], strict=True)
    }
    rows: list[Row] = []
    for number in gpus:
        speeds = {}
        for scheme, (depth, batch, again) in schemes.items():
            # As many tokens as in four times as many sequences of 128.
            forward, backward = (48 // depth * each for each in times[4 * batch])
            width = number // depth
            micro_batches = sequences * number // (width * batch)
            family = SCHEMES[scheme]
            built = family.build(depth, micro_batches if family.synchronous else 40 * depth)
            costs = Costs(forward, backward + again * forward)
            seconds = float(simulate(built, costs).makespan) * micro_batches / built.micro_batches
            speeds[scheme] = sequences * number / seconds
        printed = published("chimera", "Figure 16")[str(number)]
        note = (
            "interconnect and set-ups of the figure are not known here: messages and sums are free, depth and tokens "
            "of a micro-batch are those of Figure 14, and the attention's larger share is left out"
        )
        rows += [
            Row(
                f"Chimera over {scheme}, {number} GPUs",
                round(printed["Chimera"] / printed[scheme], 3),
                speeds["Chimera"] / speed,
                Tolerance(tolerance),
                note=note,
            )
            for scheme, speed in speeds.items()
            if scheme != "Chimera"
        ]
    return Result.of(rows)


def larger_batches(
    machine: dict[str, float],
    figure: str,
    model: str,
    nodes: int,
    tolerance: str,
    schemes: dict[str, list[Any]],
) -> Result:
    """Throughput by mini-batch: Figures 17 and 18.

    Args:
        machine: the constants of `Machine`.
        figure: Figure 17 or 18.
        model: a key of `recipes.reproduce.piz_daint.BLOCKS`.
        nodes: P100s.
        tolerance: of the throughputs.
        schemes: for each label of the figure depth, micro-batch, whether recomputed, and Chimera's way to scale.
    """
    points, rows = published("chimera", figure), []
    drawn: tuple[dict[str, list[tuple[float, float]]], dict[str, list[tuple[float, float]]]] = ({}, {})
    for label, (depth, batch, again, *scaling) in schemes.items():
        family: str | Family = Chimera(scaling=scaling[0]) if scaling else label
        for total, speed in zip(points["Bhat"], points[label], strict=True):
            found = simulated(Machine(**machine), family, model, nodes // depth, depth, batch, total, bool(again))
            name = label.replace("_", ", ")
            what = f"{name}, mini-batch of {total:,}"
            known = bool(scaling) and in_figure13(model, speed)
            note = KNOWN if known else UNMODELLED
            rows.append(Row(what, speed, found, Tolerance(tolerance), UNIT, in_sample=known, note=note))
            for points_of, value in zip(drawn, (speed, found), strict=True):
                points_of.setdefault(name, []).append((total, value))
    caption = f"{figure} of Chimera, digitised, beside the simulator with the constants of Figure 13."
    axes = ("mini-batch (sequences)", f"throughput ({UNIT})")
    return Result.of(rows, lines(f"{figure}: {model} with larger mini-batches", *drawn, axes, caption))


def figure19(machine: dict[str, float], nodes: int, total: int, tolerance: str, bests: dict[str, str]) -> Result:
    """GPT-2 of 32 layers: one to sixteen pipelines.

    Args:
        machine: the constants of `Machine`.
        nodes: P100s.
        total: sequences of the mini-batch.
        tolerance: of the throughputs.
        bests: for each place the number of pipelines that is fastest in the paper.
    """
    rows, drawn = [], ({}, {})  # type: ignore[var-annotated]
    for place, speeds in published("chimera", "Figure 19").items():
        width, depth = map(int, place[1:].split("D"))
        own = {}
        for label, speed in speeds.items():
            pipes = int(label.removesuffix("pipe"))
            family: str | Family = "DAPPLE" if pipes == 1 else Chimera(pipes=pipes)
            own[pipes] = simulated(Machine(**machine), family, "GPT-2, 32 layers", width, depth, 1, total, False)
            what = f"{place}, {pipes} pipeline{'s' if pipes > 1 else ''}"
            rows.append(Row(what, speed, own[pipes], Tolerance(tolerance), UNIT, note=UNMODELLED))
            for points_of, value in zip(drawn, (speed, own[pipes]), strict=True):
                points_of.setdefault(place, []).append((pipes, value))
        fastest = str(max(own, key=lambda pipes: own[pipes]))
        rows.append(
            Row(f"{place}: fastest number of pipelines", bests[place], fastest, Tolerance("exact"), note=UNMODELLED)
        )
    caption = "Figure 19 of Chimera, digitised, beside the simulator with the constants of Figure 13."
    axes = ("pipelines", f"throughput ({UNIT})")
    title = "Figure 19: two to sixteen pipelines, GPT-2 with 32 layers on 64 nodes"
    return Result.of(rows, lines(title, *drawn, axes, caption))


def figure1(machine: dict[str, float], nodes: int, total: int, tolerance: str, schemes: dict[str, list[int]]) -> Result:
    """Throughput and memory of GPT-2 on 2,048 nodes.

    Args:
        machine: the constants of `Machine`.
        nodes: P100s.
        total: sequences of the mini-batch.
        tolerance: of the throughputs.
        schemes: for each scheme depth, micro-batch, and whether recomputed.
    """
    rows: list[Row] = []
    plotted, own = published("chimera", "Figure 1"), {}
    for scheme, (depth, batch, again) in schemes.items():
        width = nodes // depth
        whole = width * batch if scheme == "PipeDream" else total
        own[scheme] = simulated(Machine(**machine), scheme, "GPT-2", width, depth, batch, whole, bool(again))
        printed = plotted["throughput"][scheme]
        rows.append(Row(f"{scheme}: throughput", printed, own[scheme], Tolerance(tolerance), UNIT, note=UNMODELLED))
    rows += list(_memory(plotted["memory"], schemes, nodes, total))
    return Result.of(rows, _figure1(plotted["throughput"], own))


def _memory(plotted: Mapping[str, Any], schemes: Mapping[str, list[int]], nodes: int, total: int) -> Iterator[Row]:
    """Whether activations fit without recomputation."""
    for scheme, (depth, batch, _) in schemes.items():
        micro_batches = total * depth // (nodes * batch)
        most = BEYOND_MODEL * max(peaks("GPT-2", scheme, depth, batch, micro_batches))
        fits = ["out of memory", "fits"]
        note = f"{most:.1f} GB: {BEYOND_MODEL} times the memory model, as in Figure 9"
        printed = fits[plotted[scheme] != "OOM"]
        what = f"{scheme}: without recomputation in {DEVICE:.0f} GB"
        yield Row(what, printed, fits[most <= DEVICE], Tolerance("exact"), note=note)


def _figure1(plotted: Mapping[str, float], own: Mapping[str, float]) -> Picture:
    caption = "Figure 1 of Chimera, digitised, beside the simulator with the constants of Figure 13."
    return bars("Figure 1: GPT-2 on 2,048 nodes", plotted, own, f"throughput ({UNIT})", caption)
