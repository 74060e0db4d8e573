"""A Trainer with a pipeline over Gloo trains to the losses, logged values and weights of a plain Trainer."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lightning_pipe import schedules
from lightning_pipe.config import RankOrder
from lightning_pipe.schedules import GEMS, Action, Chimera, DualPipe, DualPipeV, Family, Kind, ZeroBubble
from tests.schedules.test_torch import rows
from tests.support import oracle
from tests.support.model_zoo import MAIN, SMALL, ZOO, Entry
from tests.support.oracle import Trace
from tests.support.pairs import slow_but
from tests.support.processes import run_trainers
from tests.support.trainer_runs import quiet
from tests.support.zoo.base import BATCH


@dataclass(frozen=True)
class Point:
    """One configuration of the Trainer.

    Args:
        schedule: name of the family, the family, or the path of a file.
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


def fit_all(process: int, names: list[str], point: Point) -> list[Trace]:
    """What one process runs: every model with a Trainer of its own."""
    from lightning_pipe import PipeStrategy

    quiet()
    replica = point.replica(process)
    traces = []
    for name in names:
        entry = ZOO[name]
        batches = point.batches(entry, replica)
        traces.append(
            oracle.fit(
                entry.build(),
                batches,
                point.accumulate,
                validation=entry.batches(2),
                strategy=PipeStrategy(layers=entry.layers, **point.strategy),
                devices=point.ranks * point.replicas,
                # Lightning's own sampler would shuffle
                use_distributed_sampler=False,
            )
        )
    return traces


@cache
def expected(entry: Entry, point: Point, replica: int) -> Trace:
    """One device: a plain Trainer; where there are replicas, the loop that takes the batches of all of them."""
    if point.replicas == 1:
        return oracle.train_with_lightning(entry, point.steps, point.micro_batches, point.accumulate, validation=2)
    trace = oracle.train(entry, point.steps, point.micro_batches, point.replicas, point.accumulate)
    return replace(trace, losses=trace.losses[replica :: point.replicas])


def check(entries: list[Entry], point: Point, limit: float = 100.0, fit: Callable[..., list[Trace]] = fit_all) -> None:
    """All ranks of all replicas against one device, for several models in the same processes."""
    names = [entry.name for entry in entries]
    found = run_trainers(
        fit, point.ranks * point.replicas, names=names, point=point, timeout=100 + 300 * (len(entries) > 20)
    )
    wrong: list[str] = []
    for index, entry in enumerate(entries):
        for process, traces in enumerate(found):
            truth = expected(entry, point, point.replica(process))
            assert traces[index].losses
            assert traces[index].weights
            wrong += [f"{entry}, process {process}: {line}" for line in oracle.differences(traces[index], truth)]
    assert not wrong, "\n  ".join(wrong[:30])


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        Point("interleaved", stages=4, micro_batches=3, steps=2),
        Point("gpipe", micro_batches=8, steps=2),
        Point("1f1b", stages=4, ranks=1),
    ],
    ids=str,
)
def test_main_models(point: Point) -> None:
    check(MAIN, point)


def test_two_models_of_transformers() -> None:
    check([ZOO["gpt2"], ZOO["t5"]], Point("interleaved", stages=4, micro_batches=3, steps=2))


FURTHER = [
    Point(Chimera(), stages=2, micro_batches=2),
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
]


@pytest.mark.parametrize("point", slow_but(FURTHER, FURTHER[0]), ids=str)
def test_further_schedules(point: Point) -> None:
    check([ZOO[name] for name in ("residual", "gpt2", "odd_batches")], point)


def fit_in_order(process: int, names: list[str], point: Point) -> list[Trace]:
    """As the README registers a schedule."""

    @schedules.register("gpipe_in_order")
    def gpipe_in_order(ranks: int, micro_batches: int) -> list[list[Action]]:
        return [
            [Action(kind, rank, index) for kind in (Kind.FORWARD, Kind.BACKWARD) for index in range(micro_batches)]
            for rank in range(ranks)
        ]

    return fit_all(process, names, point)


def test_a_schedule_of_ones_own_and_one_that_torch_has_written(tmp_path: Path) -> None:
    with open(tmp_path / "torch.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows("ZBVZeroBubble", 2, 4))
    point = Point(str(tmp_path / "torch.csv"), stages=4, micro_batches=4)
    check([ZOO["residual"], ZOO["gpt2"]], point)
    check([ZOO["residual"]], Point("gpipe_in_order", micro_batches=3), fit=fit_in_order)


@pytest.mark.parametrize("start", slow_but([0, 1, 2], 0))
def test_small_models(start: int) -> None:
    """Every third of those that the engine's tests train without a Trainer, beginning with one of the first three."""
    point = Point("1f1b", micro_batches=3, steps=2)
    check([entry for entry in SMALL if entry.name != "noise" and fits(entry, point)][start::3], point)


def test_random_numbers_do_not_depend_on_the_number_of_ranks() -> None:
    points = [Point(stages=stages, ranks=ranks) for stages, ranks in ((1, 1), (4, 1), (2, 2))]
    first, *others = [run_trainers(fit_all, p.ranks, names=["noise"], point=p)[0][0] for p in points]
    for other in others:
        oracle.assert_equal(other, first)
