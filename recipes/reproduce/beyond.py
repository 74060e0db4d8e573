"""Beyond the papers: later schedules on the papers' machines, and what the search would have chosen there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_pipe.planning.cost_profile import CostProfile, LayerSizes, SizeCosts
from lightning_pipe.planning.search import search
from lightning_pipe.schedules import Family
from lightning_pipe.simulate import Link
from recipes.reproduce.counted import sizes_of_stages
from recipes.reproduce.memory import BLOCK, activation, peaks
from recipes.reproduce.pictures import lines
from recipes.reproduce.piz_daint import BLOCKS, SAMPLE, Machine, simulated
from recipes.reproduce.published import published
from recipes.reproduce.results import Result, Row
from recipes.reproduce.sleeping import family_of
from recipes.reproduce.throughput import BEYOND_MODEL, DEVICE, UNIT

SIZES = (1, 2, 4, 8, 16, 32, 64)


def later_schedules(
    machine: dict[str, float],
    model: str,
    nodes: Sequence[int],
    sequences: int,
    depths: Sequence[int],
    batches: Sequence[int],
    schedules: Sequence[str],
    figure: str,
) -> Result:
    """Every schedule in its best depth and micro-batch, with more and more nodes.

    Args:
        machine: the constants of `Machine`.
        model: a key of `recipes.reproduce.piz_daint.BLOCKS`.
        nodes: how many.
        sequences: of the mini-batch, for each node.
        depths: of the pipelines.
        batches: sequences of a micro-batch.
        schedules: by the names of Chimera's Table 2 or of this package.
        figure: whose points of the paper are drawn, too; empty: none.
    """
    constants, rows, ours = Machine(**machine), [], {}  # type: ignore[var-annotated]
    for number in nodes:
        first = 0.0
        for name in schedules:
            found = [
                _speed(constants, each, model, number, depth, batch, sequences * number)
                for each in family_of(name).variants()
                for depth in depths
                for batch in batches
            ]
            speed, label = max(each for each in found if each is not None)
            first = first or speed
            ours.setdefault(name, []).append((number, speed))
            note = f"{label}; {speed / first:.3f} times {schedules[0]}"
            rows.append(
                Row(
                    f"{name}, {number:,} nodes, mini-batch of {sequences * number:,}", None, speed, unit=UNIT, note=note
                )
            )
    points = {}
    if figure:
        for name in schedules:
            of_figure = {int(count): speeds.get(name) for count, speeds in published("chimera", figure).items()}
            if None not in of_figure.values():
                points[name] = list(of_figure.items())
    title = f"{model} with {sequences} sequence{'s' if sequences > 1 else ''} for each node, with later schedules"
    caption = "Simulated with the constants of Figure 13. Both axes grow by factors."
    caption += f" Published points are those of {figure}, digitised." if figure else ""
    return Result.of(rows, lines(title, points, ours, ("nodes", f"throughput ({UNIT})"), caption, logarithmic=True))


def _speed(
    machine: Machine, family: Family, model: str, nodes: int, depth: int, batch: int, total: int
) -> tuple[float, str] | None:
    """The speed with its set-up; ``None`` where there is no such set-up, or it does not fit."""
    width = nodes // depth
    micro_batches, rest = divmod(total, width * batch)
    stages = depth * family.stages_per_rank
    if rest or not micro_batches or BLOCKS[model] % stages or family.published(depth, micro_batches) != micro_batches:
        return None
    again = BEYOND_MODEL * max(peaks(model, family, depth, batch, micro_batches)) > DEVICE
    speed = simulated(machine, family, model, width, depth, batch, total, again)
    return speed, f"{family.label}, W{width}D{depth}B{batch}{', recomputed' * again}"


def profile(machine: Machine, model: str) -> CostProfile:
    """The blocks of a model on the paper's machine, for `lightning_pipe.search`."""
    sequence, width, heads, blocks = BLOCK[model]
    sizes = sizes_of_stages(model, blocks)
    layers = tuple(LayerSizes(f"block {number}", size, 4 * size) for number, size in enumerate(sizes))

    def costs(batch: int) -> SizeCosts:
        forward, saved = machine.forward(model, batch), float(activation(sequence, width, heads) * batch)
        boundary = float(SAMPLE[model] * batch)
        forwards, backwards, halves, kept, sent = (
            (each,) * blocks for each in (forward, 2 * forward, forward, saved, boundary)
        )
        return SizeCosts(forwards, backwards, halves, kept, sent)

    message, all_reduce = Link(beta=1 / machine.p2p), Link(beta=1 / machine.all_reduce)
    return CostProfile(model, layers, {size: costs(size) for size in SIZES}, message=message, all_reduce=all_reduce)


def searched(machine: dict[str, float], cases: dict[str, dict[str, Any]]) -> Result:
    """What the search chooses, and what that would take with messages that occupy both ends.

    Args:
        machine: the constants of `Machine`.
        cases: title -> model, nodes, mini-batch, depths to look at, and the paper's choice.
    """
    constants, rows = Machine(**machine), []
    for title, case in cases.items():
        nodes, total, model = case["nodes"], case["total"], case["model"]
        limit = DEVICE * 1e9 / BEYOND_MODEL
        found = [
            search(profile(constants, model), nodes, total, memory=limit, pipeline_parallel_size=depth, shown=3).best
            for depth in case["depths"]
        ]
        best = min(found, key=lambda one: one.seconds)
        own = best.configuration
        rows.append(
            Row(f"{title}: set-up", case["chosen"], f"W{own.replicas}D{own.ranks}B{own.samples}", note=own.label)
        )
        note = f"{own.label}; messages run beside compute, as in this package's engine"
        rows.append(Row(f"{title}: predicted by the search", case["speed"], total / best.seconds, unit=UNIT, note=note))
        blocking = simulated(
            constants, own.family, model, own.replicas, own.ranks, own.samples, total, own.recompute != "never"
        )
        note = "the same, with messages that occupy both ends, as the authors' machine is modelled"
        rows.append(
            Row(f"{title}: the same in the simulator of Figure 14", case["speed"], blocking, unit=UNIT, note=note)
        )
    return Result.of(rows)
