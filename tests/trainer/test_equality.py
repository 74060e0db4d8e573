"""A Trainer with a pipeline over Gloo trains to the losses, logged values and weights of a plain Trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import lightning as L
import pytest

from lightning_pipe.config import RankOrder
from lightning_pipe.schedules import GEMS, Chimera, DualPipe, DualPipeV, Family, ZeroBubble
from tests.support import oracle
from tests.support.model_zoo import MAIN, SMALL, ZOO, Entry
from tests.support.oracle import Trace
from tests.support.pairs import asked
from tests.support.processes import run_trainers
from tests.support.trainer_runs import quiet
from tests.support.zoo.base import BATCH


@dataclass(frozen=True)
class Point:
    """One configuration of the Trainer.

    Args:
        schedule: name of the family, or the family.
        stages: number of stages.
        micro_batches: per batch.
        ranks: processes of a pipeline.
        replicas: pipelines.
        accumulate: ``accumulate_grad_batches``.
        rank_order: whose processes have neighbouring numbers.
        steps: optimizer steps.
    """

    schedule: str | Family = "1f1b"
    stages: int = 2
    micro_batches: int = 3
    ranks: int = 2
    replicas: int = 1
    accumulate: int = 1
    steps: int = 3
    rank_order: RankOrder = "pipeline"

    def __str__(self) -> str:
        label = self.schedule if isinstance(self.schedule, str) else self.schedule.label
        text = f"{label}-s{self.stages}-m{self.micro_batches}-p{self.ranks}-d{self.replicas}"
        text += "" if self.rank_order == "pipeline" else f"-{self.rank_order}"
        return text if self.accumulate == 1 else f"{text}-a{self.accumulate}"

    @property
    def strategy(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule,
            "stages": self.stages,
            "micro_batches": self.micro_batches,
            "pipeline_parallel_size": self.ranks,
            "data_parallel_size": self.replicas,
            "deferred_batch_norm": False,
            "rank_order": self.rank_order,
        }

    def replica(self, process: int) -> int:
        """The pipeline of a process."""
        return process // self.ranks if self.rank_order == "pipeline" else process % self.replicas

    def batches(self, entry: Entry, replica: int) -> list[Any]:
        """What a replica trains with."""
        return entry.batches(self.steps * self.accumulate * self.replicas)[replica :: self.replicas]


def fits(entry: Entry, point: Point) -> bool:
    return (entry.replicas or point.replicas == 1) and BATCH // point.micro_batches >= entry.fewest


POINT = Point("1f1b", micro_batches=3, steps=2)
"""For small models: those that the engine's tests train without a Trainer, in three parts."""
EVERY_THIRD = [[entry for entry in SMALL if entry.name != "noise" and fits(entry, POINT)][n::3] for n in range(3)]
THREE = [ZOO[name] for name in ("residual", "gpt2", "odd_batches")]
KINDS = [ZOO[name] for name in ("structures", "statistics", "odd_batches")]
"""Shapes of values, a buffer, and batches of other sizes; the engine's tests have the others."""
FAST: list[tuple[Point, list[Entry]]] = [
    (Point("interleaved", stages=4, micro_batches=3, steps=2), THREE[1:2]),
    (Point(Chimera(), stages=2, micro_batches=2, steps=2), THREE[:1]),
    (POINT, KINDS),
]
"""The engine's tests run a file of torch's, and those of the pages a schedule of one's own."""
SLOW: list[tuple[Point, list[Entry]]] = [
    (Point("interleaved", stages=4, micro_batches=3, steps=2), MAIN),
    (Point("gpipe", micro_batches=8, steps=2), MAIN),
    (Point("1f1b", stages=4, ranks=1), MAIN),
    *((POINT, entries) for entries in EVERY_THIRD),
    (Point(Chimera(), stages=2, micro_batches=2), THREE),
    *(
        (point, THREE)
        for point in (
            Point(ZeroBubble("v"), stages=4, micro_batches=8),
            Point("1f1b", micro_batches=3, accumulate=2, steps=2),
            Point("1f1b", stages=2, ranks=2, replicas=2, steps=2),
            # tests of several nodes have this order of ranks among the fast ones
            Point("1f1b", stages=2, ranks=2, replicas=2, steps=2, rank_order="replicas"),
            Point(DualPipeV(), stages=4, micro_batches=1, accumulate=2, steps=2),
            Point(Chimera(pipes=4, sync="eager"), stages=4, micro_batches=3, ranks=4),
            Point("1f1b", stages=4, ranks=4),
            Point(DualPipe(), stages=2, micro_batches=3, replicas=2),
            Point(GEMS(), stages=4, micro_batches=3, ranks=4),
            Point(ZeroBubble("h2"), stages=4, micro_batches=8, ranks=4),
            Point(Chimera(scaling="forward_doubling"), stages=2, micro_batches=8),
            Point(Chimera(scaling="backward_halving"), stages=2, micro_batches=8),
            Point("naive", stages=2, replicas=2),
        )
    ),
]
CASES = [*FAST, *SLOW]


def train(process: int, name: str, point: Point) -> Trace:
    """What one process runs of a model."""
    from lightning_pipe import PipeStrategy

    entry = ZOO[name]
    quiet()
    L.seed_everything(7, verbose=False)
    return oracle.fit(
        entry.build(),
        point.batches(entry, point.replica(process)),
        point.accumulate,
        validation=entry.batches(2),
        strategy=PipeStrategy(layers=entry.layers, **point.strategy),
        devices=point.ranks * point.replicas,
        num_sanity_val_steps=0,
        # Lightning's own sampler would shuffle
        use_distributed_sampler=False,
    )


def train_all(process: int, numbers: list[int]) -> dict[int, list[Trace]]:
    """Every model of some cases with a Trainer of its own."""
    return {n: [train(process, entry.name, CASES[n][0]) for entry in CASES[n][1]] for n in numbers}


@cache
def expected(entry: Entry, point: Point, replica: int) -> Trace:
    """One device: a plain Trainer; where there are replicas, the loop that takes the batches of all of them."""
    if point.replicas == 1:
        return oracle.train_with_lightning(entry, point.steps, point.micro_batches, point.accumulate, validation=2)
    trace = oracle.train(entry, point.steps, point.micro_batches, point.replicas, point.accumulate)
    return replace(trace, losses=trace.losses[replica :: point.replicas])


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[int, Any]:
    """By case what each process leaves, of all that were asked for, from one world of each size."""
    found = {}
    for size in (1, 2, 4):
        numbers = [n for n in asked(request, "number") if CASES[n][0].ranks * CASES[n][0].replicas == size]
        world = run_trainers(train_all, size, timeout=40 + 60 * len(numbers), numbers=numbers) if numbers else ()
        found |= {n: [of_process[n] for of_process in world] for n in numbers}
    return found


def case(number: int) -> Any:
    point, entries = CASES[number]
    marks = () if number < len(FAST) else pytest.mark.slow
    return pytest.param(number, id=f"{point}-{entries[0]} and {len(entries) - 1} more", marks=marks)


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("number", [case(number) for number in range(len(CASES))])
def test_equals_one_device(number: int, trained: dict[int, Any]) -> None:
    """All ranks of all replicas against one device."""
    point, entries = CASES[number]
    wrong: list[str] = []
    for process, traces in enumerate(trained[number]):
        for entry, trace in zip(entries, traces, strict=True):
            assert trace.losses
            assert trace.weights
            truth = expected(entry, point, point.replica(process))
            wrong += [f"{entry}, process {process}: {line}" for line in oracle.differences(trace, truth)]
    assert not wrong, "\n  ".join(wrong[:30])
