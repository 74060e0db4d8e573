"""Peak memory of Chimera and of what it is compared with: Figure 9 by the simulator."""

from __future__ import annotations

from functools import cache

from lightning_pipe.schedules import Family
from lightning_pipe.simulate import Memory, memory_over_time, peak
from recipes.reproduce.bubbles import SCHEMES
from recipes.reproduce.counted import sizes_of_stages
from recipes.reproduce.pictures import bars
from recipes.reproduce.published import published
from recipes.reproduce.results import Result, Row, Tolerance

EXACT = Tolerance("exact")
BLOCK = {"Bert-48": (128, 1024, 16, 48), "GPT-2": (632, 1280, 20, 64), "GPT-2, 32 layers": (632, 1280, 20, 32)}
"""Sequence, width, heads, blocks."""

GB = 1e9


def activation(sequence: int, width: int, heads: int) -> int:
    """Bytes that a block keeps for one sequence in single precision: 2sh(34 + 5as/h)."""
    return 2 * sequence * (34 * width + 5 * heads * sequence)


@cache
def peaks(model: str, scheme: str | Family, depth: int, batch: int, micro_batches: int | None = None) -> list[float]:
    """For every worker its peak in GB: weights, gradients and Adam's moments all the time, and activations.

    Args:
        model: a key of `BLOCK`.
        scheme: of Chimera's Table 2, or any schedule; its stages are equal shares of the model.
        depth: D.
        batch: sequences of a micro-batch.
        micro_batches: N; by default D. Without a flush there are always enough of them.
    """
    sequence, width, heads, blocks = BLOCK[model]
    family = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    stages = depth * family.stages_per_rank
    sizes = sizes_of_stages(model, stages)
    memory = Memory(
        weights=[4 * size for size in sizes],
        gradients=0,  # torch 1.6 keeps them from step to step: they are counted with the optimizer
        optimizer=[12 * size for size in sizes],
        activations=activation(sequence, width, heads) * batch * blocks // stages,
    )
    schedule = family.build(depth, micro_batches or depth if family.synchronous else 4 * depth)
    return [float(peak(points).total) / GB for points in memory_over_time(schedule, memory)]


def figure9(set_ups: dict[str, list[str | int]], tolerance: str) -> Result:
    """The largest memory over the workers.

    Args:
        set_ups: for each label of the figure model, depth and micro-batch.
        tolerance: of the memory, which the model underestimates: the authors' has buffers that no formula counts.
    """
    rows, printed, own = [], {}, {}
    for label, (model, depth, batch) in set_ups.items():
        found = {scheme: max(peaks(str(model), scheme, int(depth), int(batch))) for scheme in SCHEMES}
        rows += _set_up(label, found, Tolerance(tolerance))
        for scheme in ("Chimera", "DAPPLE", "GEMS", "2BW"):
            printed[f"{label}, {scheme}"] = published("chimera", "Figure 9")[label][scheme]["max"]
            own[f"{label}, {scheme}"] = found[scheme]
    block = activation(*BLOCK["Bert-48"][:3]) / 2**20
    measured = published("chimera", "P100 profile")["activation_MiB"]
    rows.append(Row("activations of a Bert block, profiled by the authors", measured, block, Tolerance("0.1 %"), "MiB"))
    caption = (
        "Figure 9 of Chimera, digitised, beside the memory model; published bars that end at 16.8 GB ran out of memory."
    )
    picture = bars("Figure 9: largest memory on a worker", printed, own, "peak memory (GB)", caption)
    return Result.of(rows, picture)


def _set_up(label: str, found: dict[str, float], tolerance: Tolerance) -> list[Row]:
    printed = {scheme: each["max"] for scheme, each in published("chimera", "Figure 9")[label].items()}
    note = "the model counts weights, gradients, the optimizer's state and activations alone"
    rows = [
        Row(f"{label}: {scheme}", printed[scheme], found[scheme], tolerance, "GB", note=note)
        for scheme in ("Chimera", "DAPPLE", "GEMS")
    ]
    more, own = ("more" if each["Chimera"] > each["DAPPLE"] else "less" for each in (printed, found))
    apart = abs(printed["Chimera"] / printed["DAPPLE"] - 1)
    note = f"the published values are {apart:.0%} apart"
    rows.append(Row(f"{label}: Chimera beside DAPPLE", more, own, EXACT, note=note))
    order = ["GEMS", "DAPPLE", "2BW", "PipeDream"]
    told = " < ".join(sorted(order, key=lambda scheme: found[scheme]))
    rows.append(Row(f"{label}: order", " < ".join(order), told, EXACT))
    return rows
