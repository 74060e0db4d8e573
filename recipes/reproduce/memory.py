"""Peak memory of Chimera and of what it is compared with: Figure 9 by the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from lightning_pipe.simulate import Memory, memory_over_time, peak
from recipes.reproduce.bubbles import SCHEMES
from recipes.reproduce.counted import sizes_of_stages
from recipes.reproduce.pictures import bars
from recipes.reproduce.piz_daint import BLOCKS, SAMPLE, Machine
from recipes.reproduce.published import published
from recipes.reproduce.results import Result, Row, near, shares

BLOCK = {"Bert-48": (128, 1024, 16), "GPT-2": (632, 1280, 20), "GPT-2, 32 layers": (632, 1280, 20)}
"""Sequence, width, heads."""

VOCABULARY = {"Bert-48": 30522, "GPT-2": 50257, "GPT-2, 32 layers": 50257}
DEVICE = 16.0
"""GB of a P100."""

GB = 1e9


def activation(sequence: int, width: int, heads: int) -> int:
    """Bytes that a block keeps for one sequence in single precision: 2sh(34 + 5as/h)."""
    return 2 * sequence * (34 * width + 5 * heads * sequence)


def of_stages(model: str, stages: int, batch: int) -> Memory:
    """Bytes of equal stages: weights, gradients and Adam's moments all the time, and activations.

    The last stage keeps its logits, their softmax, and the gradient of both.

    Args:
        model: a key of `BLOCK`.
        stages: of the model.
        batch: sequences of a micro-batch.
    """
    sizes, (sequence, width, heads) = sizes_of_stages(model, stages), BLOCK[model]
    activations = [activation(sequence, width, heads) * batch * BLOCKS[model] / stages] * stages
    activations[-1] += 3 * 4 * sequence * VOCABULARY[model] * batch
    return Memory(
        weights=[4 * size for size in sizes],
        gradients=0,  # torch 1.6 keeps them from step to step: they are counted with the optimizer
        optimizer=[12 * size for size in sizes],
        activations=activations,
        inputs=SAMPLE[model] * batch,
    )


@cache
def peaks(model: str, scheme: str, depth: int, batch: int, micro_batches: int | None = None) -> tuple[float, ...]:
    """For every worker its peak in GB, without what the allocator keeps besides.

    Args:
        model: a key of `BLOCK`.
        scheme: of Chimera's Table 2; its stages are equal shares of the model.
        depth: D.
        batch: sequences of a micro-batch.
        micro_batches: N; by default D. Without a flush there are always enough of them.
    """
    family = SCHEMES[scheme]
    schedule = family.build(depth, micro_batches or depth if family.synchronous else 4 * depth)
    memory = of_stages(model, schedule.stages, batch)
    return tuple(float(peak(points).total) / GB for points in memory_over_time(schedule, memory))


def fits(machine: Machine, most: float) -> bool:
    """Whether a peak fits into a P100 with what the allocator keeps besides."""
    return machine.allocator * most <= DEVICE


def figure9(machine: Machine, set_ups: dict[str, Sequence[str | int]]) -> Result:
    """The largest and the smallest memory over the workers.

    Args:
        machine: its constants.
        set_ups: for each label of the figure model, depth and micro-batch.
    """
    rows: list[Row] = []
    printed, own = {}, {}
    for label, (model, depth, batch) in set_ups.items():
        found = {scheme: peaks(str(model), scheme, int(depth), int(batch)) for scheme in SCHEMES}
        rows += _set_up(machine, label, found)
        for scheme in ("Chimera", "DAPPLE", "GEMS", "2BW"):
            printed[f"{label}, {scheme}"] = published("chimera", "Figure 9")[label][scheme]["max"]
            own[f"{label}, {scheme}"] = machine.allocator * max(found[scheme])
    block = activation(*BLOCK["Bert-48"]) / 2**20
    measured = published("chimera", "P100 profile")["activation_MiB"]
    rows.append(Row("activations of a Bert block, profiled by the authors", measured, block, "0.1 %", "MiB"))
    caption = (
        "Figure 9 of Chimera, digitised, beside the memory model; published bars that end at 16.8 GB ran out of memory."
    )
    picture = bars("Figure 9: largest memory on a worker", printed, own, "peak memory (GB)", caption)
    return Result.of([shares(rows), *rows], picture)


def _set_up(machine: Machine, label: str, found: dict[str, tuple[float, ...]]) -> Iterator[Row]:
    printed = published("chimera", "Figure 9")[label]
    note = "weights, gradients, Adam's state, activations and logits are counted; the allocator has one factor for all"
    for scheme, values in found.items():
        read = printed[scheme]
        if "min" not in read:
            room = f"{machine.allocator * max(values):.1f} GB"
            told = ["out of memory", "fits"][fits(machine, max(values))]
            yield Row(f"{label}: {scheme}, memory", "out of memory", told, "exact", note=f"{room}; {note}")
            continue
        for which, value in (("largest", max(values)), ("smallest", min(values))):
            key = which.removesuffix("est").replace("larg", "max").replace("small", "min")
            known = which == "largest" and machine.knows(scheme, read[key])
            yield near(f"{label}: {scheme}, {which}", read[key], machine.allocator * value, "GB", known, note)
    most = {scheme: max(values) for scheme, values in found.items()}
    apart = abs(printed["Chimera"]["max"] / printed["DAPPLE"]["max"] - 1)
    pair = (printed["Chimera"]["max"] > printed["DAPPLE"]["max"], most["Chimera"] > most["DAPPLE"])
    more, own = ("more" if each else "less" for each in pair)
    yield Row(f"{label}: Chimera beside DAPPLE", more, own, "exact", note=f"the published values are {apart:.0%} apart")
    order = ["GEMS", "DAPPLE", "2BW", "PipeDream"]
    told = " < ".join(sorted(order, key=lambda scheme: most[scheme]))
    yield Row(f"{label}: order", " < ".join(order), told, "exact")
