"""What the search would have chosen on Chimera's machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.planning.cost_profile import CostProfile, LayerSizes, SizeCosts
from lightning_pipe.planning.prediction import Configuration, Predictor
from lightning_pipe.planning.search import search
from lightning_pipe.schedules import Chimera, Schedule
from lightning_pipe.simulate import Costs, Memory
from recipes.reproduce.memory import DEVICE, of_stages, peaks
from recipes.reproduce.piz_daint import BLOCKS, Machine
from recipes.reproduce.results import Result, Row
from recipes.reproduce.throughput import UNIT, modelled

SIZES = (1, 2, 4, 8, 16, 32, 64)


class OnPizDaint(Predictor):
    """Predicts configurations of `lightning_pipe.search` as the figures are simulated.

    Args:
        machine: its constants.
        model: a key of `recipes.reproduce.piz_daint.BLOCKS`.
    """

    def __init__(self, machine: Machine, model: str) -> None:
        super().__init__(_blocks(machine, model))
        self.machine, self.model = machine, model

    def costs(self, one: Configuration, layers: Sequence[int], schedule: Schedule) -> Costs:
        """Of equal stages, by the machine."""
        doubles = isinstance(one.family, Chimera) and one.family.scaling == "forward_doubling"
        copies, again = len(schedule.holders(0)), doubles or one.recompute != "never"  # doubling recomputes by itself
        return self.machine.costs(
            one.family, self.model, one.stages, one.replicas, copies, one.samples, recompute=again
        )

    def memory(self, one: Configuration, layers: Sequence[int], schedule: Schedule) -> Memory:
        """Of equal stages, as in Figure 9."""
        return of_stages(self.model, one.stages, one.samples)

    def seconds(self, one: Configuration) -> float:
        """Of equal stages alone."""
        return float("inf") if BLOCKS[self.model] % one.stages else super().seconds(one)

    def best(self, nodes: int, total: int, depth: int, **options: Any) -> Configuration:
        """The fastest that fits."""
        limit = DEVICE * 1e9 / self.machine.allocator
        found = search(self, nodes, total, memory=limit, pipeline_parallel_size=depth, shown=1, **options)
        return found.best.configuration

    def largest(self, nodes: int, total: int, depth: int) -> Configuration:
        """The largest micro-batch that fits, best without recomputation: the rule of Chimera's section 3.4."""
        fitting = []
        for number in range(depth, total * depth // nodes + 1):
            with suppress(ConfigurationError):
                fitting.append(self.best(nodes, total, depth, families=["chimera"], micro_batches=[number]))
        return next((one for one in fitting if one.recompute == "never"), fitting[0])


def _blocks(machine: Machine, model: str) -> CostProfile:
    """The least time that blocks take, by which the search leaves configurations out."""
    blocks = BLOCKS[model]
    layers = tuple(LayerSizes(f"block {number}", 0, 0) for number in range(blocks))

    def costs(batch: int) -> SizeCosts:
        forward, backward = machine.block(model, batch)
        there, back, half, none = ((each,) * blocks for each in (forward, backward, backward / 2, 0.0))
        return SizeCosts(there, back, half, none, none)

    return CostProfile(model, layers, {size: costs(size) for size in SIZES})


def searched(machine: Machine, cases: dict[str, dict[str, Any]]) -> Result:
    """What the search chooses, beside what the paper chooses by its largest micro-batch and Equation (1).

    Args:
        machine: its constants.
        cases: model -> nodes, mini-batch, the paper's micro-batches by depth, what it chooses, what was fastest.
    """
    rows = []
    for model, case in cases.items():
        nodes, total, predictor = case["nodes"], case["total"], OnPizDaint(machine, model)
        speeds = {}
        for depth, (size, redone) in case["batches"].items():
            one = predictor.largest(nodes, total, depth)
            again = one.recompute != "never"
            what = f"{model}, D={depth}: the largest micro-batch that fits, and whether recomputed"
            printed, own = f"B{size}{', R' * redone}", f"B{one.samples}{', R' * again}"
            most = machine.allocator * max(peaks(model, "Chimera", depth, size, total * depth // (nodes * size)))
            note = f"the paper's takes {most:.1f} GB of {DEVICE:.0f} by the model without recomputation"
            rows.append(Row(what, printed, own, "exact", note=note))
            speeds[_place(one)] = modelled(machine, model, one.replicas, depth, one.samples, total, again)
        chosen = max(speeds, key=lambda place: speeds[place])
        note = ", ".join(f"{place} {speed:.1f}" for place, speed in speeds.items())
        what = f"{model}: the choice of Equation (1) among them"
        rows.append(Row(what, case["chosen"], chosen, "exact", note=f"{note} {UNIT}"))
        for title, families in (("Chimera", ["chimera"]), ("every schedule with a flush", None)):
            ones = [predictor.best(nodes, total, depth, families=families) for depth in case["batches"]]
            found = min(ones, key=predictor.seconds)
            speed = total / predictor.seconds(found)
            note = f"{found.label}: {speed:.1f} {UNIT}; the paper's fastest measured {case['speed']}"
            what, fastest = f"{model}, {title}: the fastest set-up", case["fastest"] if families else None
            rows.append(Row(what, fastest, _place(found), "exact", note=note))
    return Result.of(rows)


def _place(one: Configuration) -> str:
    return f"W{one.replicas}D{one.ranks}B{one.samples}{'R' * (one.recompute != 'never')}"
