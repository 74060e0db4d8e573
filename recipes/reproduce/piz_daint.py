"""Throughput of Chimera and of what it is compared with, under a cost model of the P100 nodes of its evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from lightning_pipe.schedules import Family, Kind
from lightning_pipe.simulate import Costs, Link, simulate
from recipes.reproduce.bubbles import SCHEMES
from recipes.reproduce.closed_forms import chimera_critical_path
from recipes.reproduce.counted import sizes_of_stages
from recipes.reproduce.pictures import bars, lines
from recipes.reproduce.published import published
from recipes.reproduce.results import Result, Row, Tolerance

BLOCKS = {"Bert-48": 48, "GPT-2": 64, "GPT-2, 32 layers": 32}
SAMPLE = {"Bert-48": 4 * (128 * 1024 + 128), "GPT-2": 4 * 632 * 1280, "GPT-2, 32 layers": 4 * 632 * 1280}
"""Bytes of a sequence between two stages: floats of the states, and of Bert's mask."""

LONG = 40
"""Micro-batches for each stage after which a run without a flush has its steady speed."""


@dataclass(frozen=True)
class Machine:
    """The four constants that are fitted to the eight modelled points of Figure 13, which the paper does not print.

    Args:
        bert: a Bert block's time over the one that the authors measured on a P100.
        gpt2: milliseconds of a GPT-2 block for one sequence, forward.
        p2p: bytes per second between two stages.
        all_reduce: bytes per second of an all-reduce, in Rabenseifner's formula.
    """

    bert: float
    gpt2: float
    p2p: float
    all_reduce: float

    def forward(self, model: str, batch: int) -> float:
        """Seconds of a block's forward pass."""
        if model != "Bert-48":
            return self.gpt2 * batch / 1e3
        profile = published("chimera", "P100 profile")
        return float(self.bert * dict(zip(profile["batch"], profile["forward_ms"], strict=True))[batch] / 1e3)

    def costs(self, model: str, depth: int, batch: int, *, recompute: bool) -> Costs:
        """Of a micro-batch on one of so many stages; sending and receiving ranks wait for a message's end."""
        forward = BLOCKS[model] // depth * self.forward(model, batch)
        send = SAMPLE[model] * batch / self.p2p
        backward = (3 if recompute else 2) * forward
        return Costs(forward, backward, backward_weight=forward, send=send, occupies="both")

    def reductions(self, model: str, depth: int, members: int) -> list[float]:
        """Seconds of each stage's all-reduce."""
        link = Link(beta=1 / self.all_reduce)
        return [float(link.all_reduce(4 * size, members)) for size in sizes_of_stages(model, depth)]


def modelled(machine: Machine, model: str, width: int, depth: int, batch: int, total: int, recompute: bool) -> float:
    """Sequences per second of Chimera by Eq. (1); the stage that is done first reduces beside the others' compute."""
    costs = machine.costs(model, depth, batch, recompute=recompute)
    forwards, backwards = chimera_critical_path(depth, total // (width * batch))
    assert isinstance(costs.forward, float)
    assert isinstance(costs.backward, float)
    assert isinstance(costs.send, float)
    path = (costs.forward + costs.send) * forwards + (costs.backward + costs.send) * backwards
    return total / (path + max(machine.reductions(model, depth, 2 * width)))


def simulated(
    machine: Machine,
    scheme: str | Family,
    model: str,
    width: int,
    depth: int,
    batch: int,
    total: int,
    recompute: bool,
) -> float:
    """Sequences per second of a scheme by the simulator.

    Reductions do not overlap with compute, but for that of the stage that a rank with several stages is done with
    first.

    Args:
        machine: its constants.
        scheme: of Chimera's Table 2, or any schedule; its stages are equal shares of the model.
        model: a key of `BLOCKS`.
        width: pipelines side by side.
        depth: ranks of a pipeline.
        batch: sequences of a micro-batch.
        total: of the mini-batch, over all pipelines.
        recompute: whether backward passes compute the forward pass again.
    """
    family = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    micro_batches = total // (width * batch)
    stages = depth * family.stages_per_rank
    whole = machine.costs(model, depth, batch, recompute=recompute)
    # A stage of a schedule with several on each rank is smaller; its messages are not.
    costs = whole.of_a_share(depth / stages)
    seconds, copies, unhidden = _passes(family, depth, micro_batches, costs)
    reductions = machine.reductions(model, stages, width * copies)
    return total / (seconds + max(sum(reductions[stage] for stage in of_rank) for of_rank in unhidden))


@cache
def _passes(
    family: Family, depth: int, micro_batches: int, costs: Costs
) -> tuple[float, int, tuple[tuple[int, ...], ...]]:
    """Seconds of a batch's passes, ranks that hold a stage, and for every rank the stages whose sums nothing hides."""
    number = micro_batches if family.synchronous else LONG * depth
    schedule = family.build(depth, number)
    timeline = simulate(schedule, costs)
    unhidden = []
    for row in timeline.compute:
        done = {event.stage: event.end for event in row if event.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)}
        first = min(done, key=lambda stage: (done[stage], -stage)) if len(done) > 1 else None
        unhidden.append(tuple(stage for stage in done if stage != first))
    return float(timeline.makespan) * micro_batches / number, len(schedule.holders(0)), tuple(unhidden)


def figure13(
    machine: dict[str, float], tolerance: str, measured_tolerance: str, set_ups: dict[str, dict[str, list[int]]]
) -> Result:
    """The modelled points, to which the machine is fitted, and the measured ones beside them.

    Args:
        machine: the constants of `Machine`.
        tolerance: of the modelled points.
        measured_tolerance: what the paper says of its model.
        set_ups: for each model and label width, depth, micro-batch, mini-batch and whether recomputed.
    """
    constants, rows = Machine(**machine), []
    measured_speeds, own = {}, {}
    for model, points in set_ups.items():
        figure = published("chimera", "Figure 13")[model]
        for label, (width, depth, batch, total, recompute) in points.items():
            found = modelled(constants, model, width, depth, batch, total, bool(recompute))
            what, unit = f"{model}, {label}", "sequences/s"
            rows.append(
                Row(f"modelled: {what}", figure["model"][label], found, Tolerance(tolerance), unit, in_sample=True)
            )
            note = "the paper's model is within 10 %; the error of the fit comes on top"
            measured = figure["measured"][label]
            measured_speeds[what], own[what] = measured, found
            rows.append(
                Row(
                    f"measured: {what}", measured, found, Tolerance(measured_tolerance), unit, in_sample=True, note=note
                )
            )
    caption = (
        "Measured by the authors, digitised from Figure 13, and Eq. (1) with constants fitted to the modelled points."
    )
    title = "Figure 13: Chimera's throughput by depth and width"
    return Result.of(rows, bars(title, measured_speeds, own, "throughput (sequences/s)", caption))


def weak_scaling(
    machine: dict[str, float],
    figure: str,
    model: str,
    sequences: int,
    tolerance: str,
    gain_tolerance: str,
    schemes: dict[str, list[Any]],
    order: list[str],
    ordered: list[int],
    reasons: dict[str, str] | None = None,
) -> Result:
    """Weak scaling, with the constants of Figure 13: out of sample, but for the points that it has as well.

    Args:
        machine: the constants of `Machine`.
        figure: Figure 14 or 15.
        model: a key of `BLOCKS`.
        sequences: of the mini-batch, for each node.
        tolerance: of the throughputs.
        gain_tolerance: of Chimera's gain over each of the others on the most nodes.
        schemes: for each scheme depth, or that for each number of nodes, micro-batch, and whether recomputed.
        order: from fastest to slowest, as in the paper.
        ordered: on how many nodes.
        reasons: for a scheme why its throughput does not come out.
    """
    constants, found = Machine(**machine), {}
    points, rows = published("chimera", figure), []
    for at, nodes in enumerate(map(int, points)):
        for scheme, (depths, batch, recompute) in schemes.items():
            depth = depths[at] if isinstance(depths, list) else depths
            width = nodes // depth
            # PipeDream steps after every micro-batch: its mini-batch is that of all pipelines' micro-batches.
            total = width * batch if scheme == "PipeDream" else sequences * nodes
            speed = simulated(constants, scheme, model, width, depth, batch, total, bool(recompute))
            found[nodes, scheme] = speed
            what, printed = f"{scheme}, {nodes:,} nodes", points[str(nodes)][scheme]
            known = scheme == "Chimera" and in_figure13(model, printed)
            note = KNOWN if known else (reasons or {}).get(scheme, MARGIN)
            rows.append(Row(what, printed, speed, Tolerance(tolerance), "sequences/s", in_sample=known, note=note))
    for nodes in ordered:
        sequence = sorted(order, key=lambda scheme: -found[nodes, scheme])
        what = f"order on {nodes:,} nodes"
        rows.append(
            Row(what, " > ".join(order), " > ".join(sequence), Tolerance("exact"), note="neighbours are close by")
        )
    drawn: dict[str, dict[str, list[tuple[float, float]]]] = {"published": {}, "ours": {}}
    for (nodes, scheme), speed in found.items():
        drawn["published"].setdefault(scheme, []).append((nodes, points[str(nodes)][scheme]))
        drawn["ours"].setdefault(scheme, []).append((nodes, speed))
    picture = lines(
        f"{figure}: weak scaling of {model}",
        drawn["published"],
        drawn["ours"],
        ("nodes", "throughput (sequences/s)"),
        f"{figure} of Chimera, digitised, beside the simulator; both axes grow by factors.",
        logarithmic=True,
    )
    return Result.of([*rows, *_gains(found, figure, max(map(int, points)), schemes, gain_tolerance)], picture)


KNOWN = "Figure 13 has this point as well: the constants are fitted to the paper's model of it"


def in_figure13(model: str, speed: float) -> bool:
    """Whether a speed of Chimera is a measured point of Figure 13, read once more from another figure.

    Args:
        model: a key of `BLOCKS`.
        speed: as digitised, to a tenth.
    """
    return any(abs(speed - each) < 0.15 for each in published("chimera", "Figure 13")[model]["measured"].values())


MARGIN = "the constants are those of Figure 13; the model overlaps communication of no scheme but Chimera's"


def _gains(
    found: dict[tuple[int, str], float], figure: str, nodes: int, schemes: dict[str, list[Any]], tolerance: str
) -> Iterator[Row]:
    printed = published("chimera", "Section 4")[f"speed over others, {figure}"]
    reason = "the margin rests on the authors' machine: the model overlaps communication of no scheme but Chimera's"
    for scheme in schemes:
        if scheme != "Chimera":
            gain = found[nodes, "Chimera"] / found[nodes, scheme]
            what = f"Chimera over {scheme}, {nodes:,} nodes"
            yield Row(what, printed[scheme], gain, Tolerance(tolerance), note=reason)


def averages(figure: str, first: int, schemes: dict[str, str], ours: str, tolerance: str) -> Result:
    """The mean gain of Chimera that the text gives, from the digitised points: a check of the reading alone.

    Args:
        figure: as Figure 17.
        first: smallest mini-batch of the mean.
        schemes: those compared with, and the printed gains.
        ours: which of Chimera's curves.
        tolerance: of the gains.
    """
    points, rows = published("chimera", figure), []
    for scheme, printed in schemes.items():
        pairs = zip(points["Bhat"], points[ours], points[scheme], strict=True)
        gains = [own / other for size, own, other in pairs if size >= first]
        rows.append(Row(f"Chimera over {scheme}, mean", float(printed), sum(gains) / len(gains), Tolerance(tolerance)))
    return Result.of(rows)
