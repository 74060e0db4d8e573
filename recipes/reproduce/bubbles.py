"""Bubble ratios, weights and activations: published formulas beside the simulator, exactly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from lightning_pipe.schedules import (
    GEMS,
    BitPipe,
    Chimera,
    DualPipe,
    Family,
    GPipe,
    Interleaved,
    LoopedBFS,
    OneFOneB,
    PipeDream,
    PipeDream2BW,
    Schedule,
    ZeroBubble,
    with_recompute,
)
from lightning_pipe.simulate import Costs, Memory, memory_over_time, peak, simulate
from recipes.reproduce.closed_forms import chimera_critical_path, chimera_time
from recipes.reproduce.published import published
from recipes.reproduce.results import Result, Row, near

EQUAL = Costs(forward=1, backward=1)
SCHEMES: dict[str, Family] = {
    "PipeDream": PipeDream(),
    "2BW": PipeDream2BW(),
    "GPipe": GPipe(),
    "GEMS": GEMS(),
    "DAPPLE": OneFOneB(),
    "Chimera": Chimera(),
}
"""The schemes of Chimera's Table 2; DAPPLE is the paper's name for 1F1B with a flush."""


def value(formula: str, **letters: int) -> Fraction:
    """The value of a published formula; a number before a letter multiplies it.

    Example:
        >>> value("(D-2)/(2N+D-2)", D=4, N=4), value("(D-1)/(D+1/2)", D=4)
        (Fraction(1, 5), Fraction(2, 3))
    """
    multiplied = re.sub(r"(?<=\w)(?=[A-Za-z(])", "*", formula)
    exact = re.sub(r"\d+", r"Fraction(\g<0>)", multiplied)
    return Fraction(eval(exact, {"Fraction": Fraction}, {name: Fraction(number) for name, number in letters.items()}))


def bubble(schedule: Schedule, costs: Costs = EQUAL) -> Fraction:
    """Of a batch; without a flush, of the steady state."""
    timeline = simulate(schedule, costs)
    return Fraction(timeline.bubble_ratio if schedule.synchronous else timeline.steady_bubble_ratio)


def interval(values: Sequence[int]) -> tuple[Fraction, Fraction]:
    """The smallest and the largest."""
    return Fraction(min(values)), Fraction(max(values))


def weights(schedule: Schedule) -> list[int]:
    """For every rank the versions and copies of stages that it holds."""
    return [len(schedule.stages_of(rank)) * schedule.weight_versions[rank] for rank in range(schedule.ranks)]


def chimera_table2(depths: Sequence[int], multiples: Sequence[int], gems_tolerance: str) -> Result:
    """All rows of Table 2 for forward and backward passes of one length.

    Args:
        depths: D.
        multiples: N / D.
        gems_tolerance: for the row that the paper gives with an "about".
    """
    rows = []
    for scheme, row in published("chimera", "Table 2").items():
        for depth in depths:
            rows += _table2(scheme, row, depth, multiples, gems_tolerance)
    return Result.of(rows)


def _table2(scheme: str, row: dict[str, str], depth: int, multiples: Sequence[int], gems: str) -> list[Row]:
    family = SCHEMES[scheme]
    # What has no flush or is published as a limit is simulated long enough to show it.
    numbers = [depth * each for each in multiples] if scheme not in ("GEMS", "PipeDream", "2BW") else [64 * depth]
    built = [family.build(depth, number) for number in numbers]
    # The limit of GEMS is that of backward passes which take two forward passes.
    costs = Costs() if scheme == "GEMS" else EQUAL
    place = f"{scheme}, D={depth}, N={', '.join(map(str, numbers))}"
    note = (
        f"{row['bubble']}; the limit of many micro-batches, backward = 2 forward" if scheme == "GEMS" else row["bubble"]
    )
    return [
        Row(
            f"bubble: {place}",
            tuple(value(row["bubble"], D=depth, N=number) for number in numbers),
            tuple(float(bubble(one, costs)) if scheme == "GEMS" else bubble(one, costs) for one in built),
            gems if scheme == "GEMS" else "exact",
            note=note,
        ),
        Row(
            f"weights, least and most on a worker, in stages: {place}",
            tuple(value(each, D=depth) for each in row["weights"]),
            interval(weights(built[0])),
            "exact",
        ),
        Row(
            f"activations, least and most on a worker, in micro-batches: {place}",
            tuple(value(each, D=depth, N=numbers[0]) for each in row["activations"]),
            interval(simulate(built[0], EQUAL).peak_activations),
            "exact",
        ),
    ]


def chimera_table3(depths: Sequence[int], multiples: Sequence[int]) -> Result:
    """Table 3: 2f pipelines for every f that divides D / 2."""
    formulas, rows = published("chimera", "Table 3"), []
    for depth in depths:
        for half in (each for each in range(1, depth // 2 + 1) if depth // 2 % each == 0):
            numbers = [depth * each for each in multiples]
            built = [Chimera(pipes=2 * half).build(depth, number) for number in numbers]
            letters = {"D": depth, "f": half}
            place = f"D={depth}, {2 * half} pipelines"
            rows += [
                Row(
                    f"bubble: {place}, N={', '.join(map(str, numbers))}",
                    tuple(value(formulas["bubble"], N=number, **letters) for number in numbers),
                    tuple(map(bubble, built)),
                    "exact",
                    note=formulas["bubble"],
                ),
                Row(
                    f"weights and activations, least and most on a worker: {place}",
                    (
                        value(formulas["weights"], **letters),
                        *(value(each, **letters) for each in formulas["activations"]),
                    ),
                    (interval(weights(built[0]))[1], *interval(simulate(built[0], EQUAL).peak_activations)),
                    "exact",
                ),
            ]
    return Result.of(rows)


def chimera_figure1(tolerances: dict[str, str]) -> Result:
    """The plotted bubbles of GPT-2 on 2048 nodes, with a mini-batch of 2048."""
    plotted = published("chimera", "Figure 1")["bubble"]
    rows = []
    for label, depth in (("DAPPLE", 16), ("Chimera", 32), ("GPipe", 8), ("GEMS", 8)):
        # Micro-batches of one sequence on 2048 nodes: as many for each worker as there are stages.
        if label == "GEMS":
            found, note = bubble(GEMS().build(depth, 64 * depth), Costs()), "the limit of many micro-batches"
        else:
            found, note = bubble(SCHEMES[label].build(depth, depth)), "slots of one length, N = D"
        rows.append(
            Row(
                f"{label}, D={depth}",
                plotted[f"{label}(D{depth})"],
                float(100 * found),
                tolerances[label],
                "%",
                note=note,
            )
        )
    real = float(100 * bubble(Chimera().build(32, 32), Costs()))
    rows.append(
        Row("Chimera, D=32, backward = 2 forward", None, real, unit="%", note="the figure assumes slots of one length")
    )
    return Result.of(rows)


def chimera_figure6() -> Result:
    """The critical path of six stages and six micro-batches, and the bubble with backward = 2 forward."""
    printed = published("chimera", "Figure 6")
    forwards, backwards = chimera_critical_path(6, 6)
    rows = [
        Row("forward passes on the critical path, D=N=6", printed["forwards"], forwards, "exact"),
        Row("backward passes on the critical path, D=N=6", printed["backwards"], backwards, "exact"),
        Row("time of an iteration by Eq. (1), F=1, B=2", printed["time"], chimera_time(6, 6, 1, 2), "exact", "F"),
        Row("the same, simulated", printed["time"], int(simulate(Chimera().build(6, 6)).makespan), "exact", "F"),
    ]
    for depth in (4, 6, 8, 16, 32):
        formula = value("(D-2)/(3N/2+D-2)", D=depth, N=depth)
        found = bubble(Chimera().build(depth, depth), Costs())
        rows.append(Row(f"bubble with backward = 2 forward, D=N={depth}", formula, found, "exact"))
    return Result.of(rows)


def gpipe_figure2(devices: int, micro_batches: int) -> Result:
    """The drawing of naive and of pipelined model parallelism, with slots of one length.

    Args:
        devices: K.
        micro_batches: M.
    """
    drawn, letters = published("gpipe", "Figure 2"), {"K": devices, "M": micro_batches}
    pipelined = GPipe().build(devices, micro_batches)
    naive = GPipe().build(devices, 1)
    slots = int(simulate(pipelined, EQUAL).makespan)
    return Result.of(
        [
            Row("idle time without micro-batches", value(drawn["naive"], **letters), bubble(naive), "exact"),
            Row("idle time with micro-batches", value(drawn["pipelined"], **letters), bubble(pipelined), "exact"),
            Row("slots until the update, with micro-batches", drawn["slots"], slots, "exact"),
        ]
    )


def flushes(ranks: int, micro_batches: int) -> Result:
    """GPipe, PipeDream-Flush (1F1B) and PipeDream-2BW: memory with recomputation, and throughput.

    Args:
        ranks: d.
        micro_batches: m.
    """
    printed, rows = published("pipedream", "PipeDream-2BW"), []
    families = {"GPipe": GPipe(), "PipeDream-Flush": OneFOneB(), "PipeDream-2BW": PipeDream2BW(micro_batches)}
    bytes_of = {"W": 1000, "A": 90, "I": 10}
    memory = Memory(weights=1000, gradients=0, optimizer=0, activations=100, inputs=10)
    for name, family in families.items():
        number = micro_batches if family.synchronous else 8 * micro_batches
        schedule = with_recompute(family.build(ranks, number), "always")
        found = max(int(peak(points).total) for points in memory_over_time(schedule, memory))
        formula = printed["memory"][name]
        what = f"{name}, largest memory, d={ranks}, m={micro_batches}, W={1000}, A={90}, I={10}"
        rows.append(Row(what, int(value(formula, m=micro_batches, d=ranks, **bytes_of)), found, "exact", note=formula))
    flush, gpipe = (simulate(families[name].build(ranks, ranks)).makespan for name in ("PipeDream-Flush", "GPipe"))
    busy = 3 * ranks  # without a bubble, which 2BW has none of
    rows.append(Row("GPipe over PipeDream-Flush, time of a batch", None, gpipe / flush, note="the same bubble"))
    reason = (
        f"the most that its missing bubble is worth, with as few micro-batches as it may have: 2 - 1/d for d={ranks}"
    )
    rows.append(Row("2BW over PipeDream-Flush", printed["gains"]["PipeDream-Flush"], flush / busy, note=reason))
    reason += "; and a third of the work, which GPipe repeats; the rest is smaller micro-batches on the authors' GPUs"
    rows.append(near("2BW over GPipe", printed["gains"]["GPipe"], float(gpipe / busy) * 4 / 3, note=reason))
    quoted = published("pipedream", "Often quoted")["memory of activations that 1F1B saves"]
    held = simulate(OneFOneB().build(4, 4)).peak_activations
    what = "activations that 1F1B saves over GPipe, mean of 4 ranks with 4 micro-batches"
    note = "quoted without a set-up; this one gives it: 1 - (p + 1) / 2m on average, and 1 - p / m on rank 0"
    rows.append(Row(what, quoted, 100 * (1 - sum(held) / 16), unit="%", note=note))
    return Result.of(rows)


def other_formulas() -> Result:
    """Interleaved 1F1B, looped BFS, zero bubble with V-Half and V-Min, DualPipe and BitPipe: their formulas."""
    rows = []
    for ranks, micro_batches, virtual in ((4, 8, 2), (4, 16, 4), (8, 16, 2)):
        for looped, source in (
            (Interleaved(virtual), "Narayanan et al., SC'21, section 2.2"),
            (LoopedBFS(virtual), "Lamy-Poirier, MLSys'23"),
        ):
            timeline = simulate(looped.build(ranks, micro_batches))
            ideal = sum(timeline.busy) / ranks
            rows.append(
                Row(
                    f"{looped.name}, bubble over ideal time, p={ranks}, m={micro_batches}, v={virtual}",
                    Fraction(ranks - 1, virtual * micro_batches),
                    Fraction(timeline.makespan - ideal) / Fraction(ideal),
                    "exact",
                    note=f"(p-1)/(vm): {source}",
                )
            )
    split = Costs(forward=10, backward=20, backward_input=11, backward_weight=9)
    for ranks in (4, 8):
        for family, times in ((ZeroBubble("h1"), 1), (ZeroBubble("h2"), 2)):
            timeline = simulate(family.build(ranks, 4 * ranks), split)
            first, *_, last = timeline.compute[0]
            rows.append(
                Row(
                    f"zero bubble H{times}, idle time in rank 0's span, p={ranks}, F=10, B=11, W=9",
                    (ranks - 1) * (10 + 11 - times * 9),
                    int(last.end - first.start - timeline.busy[0]),
                    "exact",
                    note=f"(p-1)(F+B-{'2' if times > 1 else ''}W): Qi et al., ICLR'24, Table 2",
                )
            )
    equal = Costs(forward=1, backward=2, backward_input=1, backward_weight=1)
    ratios = [bubble(each.build(16, 32), equal) for each in (OneFOneB(), ZeroBubble("v_half"), ZeroBubble("v_min"))]
    of_1f1b, *others = [ratio / (1 - ratio) for ratio in ratios]
    for name, share, idle in zip(("V-Half", "V-Min"), (Fraction(1, 2), Fraction(2, 3)), others, strict=True):
        note = "the limit of many ranks, as the authors' program tells it"
        rows.append(near(f"{name}, idle time over 1F1B's, p=16, m=32, equal parts", share, idle / of_1f1b, note=note))
    dual = simulate(DualPipe().build(8, 20))
    peak = max(dual.peak_activations)
    rows.append(Row("DualPipe, most activations on a rank, 8 ranks, 20 micro-batches", 9, peak, "exact"))
    drawn, found = Fraction(4, 28), bubble(BitPipe().build(4, 4), Costs())
    rows.append(Row("BitPipe, bubble with backward = 2 forward, D=N=4, as drawn", drawn, found, "exact"))
    return Result.of(rows)
