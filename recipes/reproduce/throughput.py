"""Throughputs of Chimera's evaluation under the cost model of its machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lightning_pipe.schedules import Chimera, Family
from lightning_pipe.simulate import Costs, simulate
from recipes.reproduce.bubbles import SCHEMES
from recipes.reproduce.closed_forms import chimera_time
from recipes.reproduce.memory import DEVICE, fits, peaks
from recipes.reproduce.pictures import bars, lines, picture
from recipes.reproduce.piz_daint import Machine
from recipes.reproduce.published import published
from recipes.reproduce.results import Result, Row, near, shares

UNIT = "sequences/s"
FITTED = "constants are fitted to this bar"
OWN = "the paper prints no time of a single pass or message, only the whole"
Points = dict[str, list[tuple[float, float]]]


def _row(
    machine: Machine, scheme: str, what: str, speed: float, found: float, reasons: Mapping[str, str] | None = None
) -> Row:
    """A throughput of a scheme, in sample wherever the machine's constants are fitted to it."""
    known = machine.knows(scheme, speed)
    return near(what, speed, found, UNIT, known, FITTED if known else (reasons or {}).get(scheme, OWN))


def _order(what: str, printed: Mapping[str, float], found: Mapping[str, float]) -> Row:
    """Whether schemes come in the paper's order, from fastest to slowest."""
    theirs, own = (" > ".join(sorted(each, key=lambda name, each=each: -each[name])) for each in (printed, found))  # type: ignore[misc]
    ours = sorted((found[name] for name in printed), reverse=True)
    closest = min(high / low for high, low in pairwise(ours))
    return Row(what, theirs, own, "exact", note=f"the closest of ours are {100 * (closest - 1):.1f} % apart")


def figure10(machine: Machine, nodes: int, total: int, recomputed: dict[str, int], reasons: dict[str, str]) -> Result:
    """Bert-48: every scheme in every depth with every micro-batch.

    Args:
        machine: its constants.
        nodes: P100s.
        total: sequences of the mini-batch.
        recomputed: for schemes from which micro-batch on the text, Figure 9 or the job scripts say that activations
            are recomputed; otherwise they are where they do not fit.
        reasons: for a scheme why its throughputs do not come out.
    """
    found: dict[str, dict[str, float]] = {}
    printed: dict[str, dict[str, float]] = {}
    for place, of_schemes in published("chimera", "Figure 10").items():
        width, depth = map(int, place[1:].split("D"))
        assert width * depth == nodes
        for scheme, bars_of in of_schemes.items():
            for label, speed in bars_of.items():
                batch = int(label[1:]) if label.startswith("B") else 0
                if batch and total % (width * batch) == 0:
                    again = batch >= recomputed.get(scheme, total) or not fits(
                        machine, max(peaks("Bert-48", scheme, depth, batch, total // (width * batch)))
                    )
                    printed.setdefault(scheme, {})[f"{place}{label}"] = speed
                    found.setdefault(scheme, {})[f"{place}{label}"] = machine.speed(
                        scheme, "Bert-48", width, depth, batch, total, again
                    )
    return _tuning(machine, printed, found, "Figure 10", "Bert-48 on 32 nodes", reasons)


def figure11(machine: Machine, nodes: int, total: int, reasons: dict[str, str]) -> Result:
    """GPT-2: every scheme in every depth, all but GEMS with recomputation. The arguments are those of `figure10`."""
    found: dict[str, dict[str, float]] = {}
    printed: dict[str, dict[str, float]] = {}
    for scheme, bars_of in published("chimera", "Figure 11").items():
        for label, speed in bars_of.items():
            # a mini-batch of PipeDream is one micro-batch of every pipeline
            place, _, whole = label.partition(",Bhat")
            depth, _, size = place[1:].partition("B")
            width = nodes // int(depth)
            batch = int(whole) // width if whole else int(size or 1)
            printed.setdefault(scheme, {})[label] = speed
            found.setdefault(scheme, {})[label] = machine.speed(
                scheme, "GPT-2", width, int(depth), batch, int(whole or total), scheme != "GEMS"
            )
    return _tuning(machine, printed, found, "Figure 11", "GPT-2 on 512 nodes", reasons)


def _tuning(
    machine: Machine,
    printed: Mapping[str, Mapping[str, float]],
    found: Mapping[str, Mapping[str, float]],
    figure: str,
    title: str,
    reasons: Mapping[str, str],
) -> Result:
    rows = [
        _row(machine, scheme, f"{scheme}, {label}", printed[scheme][label], speed, reasons)
        for scheme, speeds in found.items()
        for label, speed in speeds.items()
    ]
    rows.insert(0, shares(rows))
    pictures = []
    for scheme, speeds in found.items():
        best, own = (max(each[scheme], key=lambda label, each=each: each[scheme][label]) for each in (printed, found))  # type: ignore[misc]
        lost = 1 - printed[scheme][own] / printed[scheme][best]
        note = f"on the authors' machine {own} is {100 * lost:.0f} % slower than {best}"
        rows.append(Row(f"{scheme}: fastest set-up", best, own, "exact", note=note))
        name = f"{figure}: {scheme}, {title}"
        pictures.append(bars(name, printed[scheme], speeds, f"throughput ({UNIT})", _caption(figure)))
    best_of = [{scheme: max(each[scheme].values()) for scheme in each} for each in (printed, found)]
    rows.append(_order("order of the fastest set-ups", *best_of))
    return Result.of(rows, *pictures)


def _caption(figure: str) -> str:
    return f"{figure} of Chimera, digitised, beside the simulator with the constants of its machine."


def figure12(machine: Machine, depth: int, batch: int, sequences: int, tolerance: str) -> Result:
    """Eager sums for the stages with idle time behind them, over eager sums for all.

    Args:
        machine: its constants.
        depth: stages.
        batch: sequences of a micro-batch.
        sequences: of the mini-batch, for each node.
        tolerance: of the gain.
    """
    rows = []
    for nodes, printed in published("chimera", "Figure 12").items():
        width = int(nodes) // depth
        eager, some, late = (
            machine.speed(Chimera(sync=way), "Bert-48", width, depth, batch, sequences * int(nodes), False)
            for way in ("eager", "eager_opt", "lazy")
        )
        reason = f"a sum beside compute slows nothing down here; against sums at the end alone it is {some / late:.3f}"
        what = f"eager-sync-opt over eager-sync, {nodes} nodes"
        rows.append(Row(what, printed, some / eager, tolerance, note=reason))
    return Result.of(rows)


def figure13(machine: Machine, set_ups: dict[str, dict[str, list[int]]], best: str) -> Result:
    """Chimera's throughput, simulated, and by the paper's own predictor, Equation (1).

    Args:
        machine: its constants.
        set_ups: for each model and label width, depth, micro-batch, mini-batch and whether recomputed.
        best: how much slower than the fastest set-up the paper's own choice is, at most.
    """
    measured, own, rows, picks = {}, {}, [], []
    for model, points in set_ups.items():
        figure, by_equation = published("chimera", "Figure 13")[model], {}
        for label, (width, depth, batch, total, again) in points.items():
            what, printed = f"{model}, {label}", figure["measured"][label]
            measured[what] = printed
            own[what] = machine.speed("Chimera", model, width, depth, batch, total, bool(again))
            rows.append(_row(machine, "Chimera", f"measured: {what}", printed, own[what]))
            by_equation[label] = modelled(machine, model, width, depth, batch, total, bool(again))
            note = "Equation (1) here and there; the paper does not print its constants"
            rows.append(
                near(f"Equation (1): {what}", figure["model"][label], by_equation[label], UNIT, note=note),
            )
        chosen = max(by_equation, key=lambda label: by_equation[label])
        lost = 1 - figure["measured"][chosen] / max(figure["measured"].values())
        what = f"{model}: slower than the fastest, the set-up that Equation (1) chooses"
        picks.append(Row(what, 0.0, round(100 * lost, 1), best, "%", note=f"it chooses {chosen}"))
    title = "Figure 13: Chimera's throughput by depth and width"
    drawn = bars(title, measured, own, f"throughput ({UNIT})", _caption("Figure 13"))
    return Result.of([shares(rows), *rows, *picks], drawn)


def modelled(machine: Machine, model: str, width: int, depth: int, batch: int, total: int, recompute: bool) -> float:
    """Sequences per second of Chimera by Equation (1), which knows one stage for all and no optimizer."""
    family = SCHEMES["Chimera"]
    costs = machine.costs(family, model, depth, width, 2, batch, recompute=recompute)
    there, back, sums = costs.forward, costs.backward, costs.reduce
    assert isinstance(there, list)
    assert isinstance(back, list)
    assert isinstance(sums, list)
    middle = depth // 2 - 1
    return total / float(
        chimera_time(depth, total // (width * batch), there[middle], back[middle], costs.send, sums)  # type: ignore[arg-type]
    )


def weak_scaling(
    machine: Machine,
    figure: str,
    model: str,
    sequences: int,
    schemes: dict[str, list[Any]],
    reasons: dict[str, str],
) -> Result:
    """Throughput by number of nodes: Figures 14 and 15.

    Args:
        machine: its constants.
        figure: Figure 14 or 15.
        model: a key of `recipes.reproduce.piz_daint.BLOCKS`.
        sequences: of the mini-batch, for each node.
        schemes: for each scheme depth, or that for each number of nodes, micro-batch, and whether recomputed.
        reasons: for a scheme why its throughput does not come out.
    """
    points, rows, found = published("chimera", figure), [], {}
    drawn: tuple[Points, Points] = ({}, {})
    for at, (nodes, printed) in enumerate(points.items()):
        speeds = {}
        for scheme, (depths, batch, again) in schemes.items():
            depth = depths[at] if isinstance(depths, list) else depths
            width = int(nodes) // depth
            # PipeDream steps after every micro-batch: its mini-batch is that of all pipelines' micro-batches.
            total = width * batch if scheme == "PipeDream" else sequences * int(nodes)
            speeds[scheme] = machine.speed(scheme, model, width, depth, batch, total, bool(again))
            what = f"{scheme}, {int(nodes):,} nodes"
            rows.append(_row(machine, scheme, what, printed[scheme], speeds[scheme], reasons))
            for points_of, value in zip(drawn, (printed[scheme], speeds[scheme]), strict=True):
                points_of.setdefault(scheme, []).append((int(nodes), value))
        found[nodes] = speeds
        rows.append(_order(f"order on {int(nodes):,} nodes", printed, speeds))
    rows.insert(0, shares(rows))
    first, *_, last = found
    gains = published("chimera", "Section 4")[f"speed over others, {figure}"]
    for scheme, gain in gains.items():
        what = f"the text: Chimera over {scheme}, {int(last):,} nodes"
        ratio = found[last]["Chimera"] / found[last][scheme]
        rows.append(near(what, gain, ratio, note=reasons.get(scheme, OWN)))
    if figure == "Figure 15":
        grown = found[last]["Chimera"] / found[first]["Chimera"] * int(first) / int(last)
        note = "a sum over more replicas takes hardly longer by Rabenseifner's formula, whatever the constants are"
        efficiency = published("chimera", "Section 4")["parallel efficiency"]
        what = f"the text: Chimera's parallel efficiency from {int(first)} to {int(last):,} nodes"
        rows.append(Row(what, efficiency, grown, "2 %", note=note))
    axes = ("nodes", f"throughput ({UNIT})")
    caption = f"{_caption(figure)} Both axes grow by factors."
    title = f"{figure}: weak scaling of {model}"
    return Result.of(rows, picture(title, lines(*drawn, axes, logarithmic=True), caption))


def larger_batches(
    machine: Machine,
    figure: str,
    model: str,
    nodes: int,
    schemes: dict[str, list[Any]],
    ours: str,
    means: dict[str, float],
    first: int,
    reasons: dict[str, str],
) -> Result:
    """Throughput by mini-batch: Figures 17 and 18.

    Args:
        machine: its constants.
        figure: Figure 17 or 18.
        model: a key of `recipes.reproduce.piz_daint.BLOCKS`.
        nodes: P100s.
        schemes: for each label of the figure depth, micro-batch, and whether recomputed, each for all mini-batches or
            for one after the other; and Chimera's way to scale.
        ours: the curve of Chimera that the text compares with the others.
        means: for each of the others Chimera's mean gain in the text.
        first: smallest mini-batch of the means.
        reasons: for a scheme why its throughput does not come out.
    """
    points, rows, found = published("chimera", figure), [], {}
    drawn: tuple[Points, Points] = ({}, {})
    for label, (depths, batch, agains, *scaling) in schemes.items():
        family: str | Family = Chimera(scaling=scaling[0]) if scaling else label
        name, scheme = label.replace("_", ", "), label.partition("_")[0]
        for at, (total, speed) in enumerate(zip(points["Bhat"], points[label], strict=True)):
            depth, again = (each[at] if isinstance(each, list) else each for each in (depths, agains))
            own = machine.speed(family, model, nodes // depth, depth, batch, total, bool(again))
            found[label, total] = own
            rows.append(_row(machine, scheme, f"{name}, mini-batch of {total:,}", speed, own, reasons))
            for points_of, value in zip(drawn, (speed, own), strict=True):
                points_of.setdefault(name, []).append((total, value))
    rows.insert(0, shares(rows))
    last = points["Bhat"][-1]
    printed = {label: points[label][-1] for label in schemes}
    rows.append(_order(f"order at {last:,}", printed, {label: found[label, last] for label in schemes}))
    for scheme, gain in means.items():
        each = [found[ours, total] / found[scheme, total] for total in points["Bhat"] if total >= first]
        what = f"the text: Chimera over {scheme}, mean of the mini-batches from {first:,} on"
        rows.append(near(what, gain, sum(each) / len(each), note=reasons.get(scheme, OWN)))
    axes = ("mini-batch (sequences)", f"throughput ({UNIT})")
    title = f"{figure}: {model} with larger mini-batches"
    return Result.of(rows, picture(title, lines(*drawn, axes), _caption(figure)))


def figure16(blocks: str, schemes: dict[str, list[int]], gpus: list[int], sequences: int, reason: str) -> Result:
    """Bert-48 with sequences of 512 on V100s, messages and sums free.

    Args:
        blocks: the published profile of a block, with sequences of 128.
        schemes: for each scheme depth, micro-batch, and whether recomputed.
        gpus: how many.
        sequences: of the mini-batch, for each GPU.
        reason: what is not known.
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
        for scheme, speed in speeds.items():
            if scheme != "Chimera":
                gain = round(printed["Chimera"] / printed[scheme], 3)
                set_ups = (
                    f"{each}, W{number // depth}D{depth}B{batch}{', R' * again}"
                    for each in ("Chimera", scheme)
                    for depth, batch, again in [schemes[each]]
                )
                rows.append(near(" over ".join(set_ups), gain, speeds["Chimera"] / speed, note=reason))
    return Result.of([shares(rows), *rows])


def figure19(machine: Machine, nodes: int, total: int, bests: dict[str, str]) -> Result:
    """GPT-2 of 32 layers: one to sixteen pipelines.

    Args:
        machine: its constants.
        nodes: P100s.
        total: sequences of the mini-batch.
        bests: for each place the number of pipelines that is fastest in the paper.
    """
    rows: list[Row] = []
    drawn: tuple[Points, Points] = ({}, {})
    for place, speeds in published("chimera", "Figure 19").items():
        width, depth = map(int, place[1:].split("D"))
        assert width * depth == nodes
        own = {}
        for label, speed in speeds.items():
            pipes = int(label.removesuffix("pipe"))
            family: str | Family = "DAPPLE" if pipes == 1 else Chimera(pipes=pipes)
            own[pipes] = machine.speed(family, "GPT-2, 32 layers", width, depth, 1, total, False)
            what = f"{place}, {pipes} pipeline{'s' if pipes > 1 else ''}"
            rows.append(near(what, speed, own[pipes], UNIT, note=OWN))
            for points_of, value in zip(drawn, (speed, own[pipes]), strict=True):
                points_of.setdefault(place, []).append((pipes, value))
        fastest = str(max(own, key=lambda pipes: own[pipes]))
        rows.append(Row(f"{place}: fastest number of pipelines", bests[place], fastest, "exact", note=OWN))
    axes = ("pipelines", f"throughput ({UNIT})")
    title = "Figure 19: two to sixteen pipelines, GPT-2 with 32 layers on 64 nodes"
    return Result.of([shares(rows), *rows], picture(title, lines(*drawn, axes), _caption("Figure 19")))


def figure1(machine: Machine, nodes: int, total: int, schemes: dict[str, list[int]], reasons: dict[str, str]) -> Result:
    """Throughput and memory of GPT-2 on 2,048 nodes.

    Args:
        machine: its constants.
        nodes: P100s.
        total: sequences of the mini-batch.
        schemes: for each scheme depth, micro-batch, and whether recomputed.
        reasons: for a scheme why its throughput does not come out.
    """
    rows: list[Row] = []
    plotted, own = published("chimera", "Figure 1"), {}
    for scheme, (depth, batch, again) in schemes.items():
        width = nodes // depth
        whole = width * batch if scheme == "PipeDream" else total
        own[scheme] = machine.speed(scheme, "GPT-2", width, depth, batch, whole, bool(again))
        printed = plotted["throughput"][scheme]
        rows.append(_row(machine, scheme, f"{scheme}: throughput", printed, own[scheme], reasons))
    rows.insert(0, shares(rows))
    rows += list(_memory(machine, plotted["memory"], schemes, nodes, total))
    title = "Figure 1: GPT-2 on 2,048 nodes"
    return Result.of(rows, bars(title, plotted["throughput"], own, f"throughput ({UNIT})", _caption("Figure 1")))


def _memory(
    machine: Machine, plotted: Mapping[str, Any], schemes: Mapping[str, Sequence[int]], nodes: int, total: int
) -> Iterator[Row]:
    """Whether activations fit without recomputation."""
    for scheme, (depth, batch, _) in schemes.items():
        most = max(peaks("GPT-2", scheme, depth, batch, total * depth // (nodes * batch)))
        words = ["out of memory", "fits"]
        note = f"{machine.allocator * most:.1f} GB by the model of Figure 9"
        printed, own = words[plotted[scheme] != "OOM"], words[fits(machine, most)]
        yield Row(f"{scheme}: without recomputation in {DEVICE:.0f} GB", printed, own, "exact", note=note)
