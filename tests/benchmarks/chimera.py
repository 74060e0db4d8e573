"""Chimera beside 1F1B with real matrix products: where fewer bubbles are worth the sums over the copies of a stage.

Cores that several ranks share have no bubble while one of these has something to compute. Ranks on fewer cores are
therefore predicted twice: each with a core of its own, and all of them on the cores that there are. However the
passes are ordered, a batch takes the seconds of all passes over the number of cores at least, so that Chimera gains
at most what 1F1B takes beyond that.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.planning.cost_profile import SizeCosts
from lightning_pipe.profiling.layers import measure_layers
from lightning_pipe.profiling.machine import measure_machine
from lightning_pipe.schedules import Action, Chimera, Family, OneFOneB, Schedule
from lightning_pipe.schedules.dependencies import remote_need, result_of
from lightning_pipe.simulate import Costs, simulate
from lightning_pipe.simulate.costs import at_stage
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology
from tests.benchmarks.measure import Finding, Ratio
from tests.support import processes

SIZES, RANKS = (256, 512, 1024, 2048), (2, 4)
SECONDS, QUICK = 45.0, 8.0
"""For the measured batches of a row."""

FEWEST, MOST = 5, 200
"""Rounds of a row."""


class Times(NamedTuple):
    """A row: seconds of each round's batch, and what they are predicted to take.

    Args:
        flushed: 1F1B's batches.
        chimera: Chimera's.
        unsummed: Chimera's without the sums over the copies of a stage.
        own_cores: predicted speed of Chimera over 1F1B with a core for every rank; with sums and without them.
        these_cores: the same on the cores that there are.
        most: the gain over 1F1B of a batch that keeps these cores busy all the time.
        cores: products that are computed at once, in those that one process computes alone.
    """

    flushed: list[float]
    chimera: list[float]
    unsummed: list[float]
    own_cores: list[float]
    these_cores: list[float]
    most: float
    cores: float


def run(quick: bool) -> Iterator[Finding]:
    """A row for every size and number of ranks, and from which size on Chimera wins."""
    titles = "with sums | without sums | simulated, own cores | on these cores | at most | cores |"
    yield Finding("| speed of Chimera over 1F1B |", titles)
    for ranks in RANKS:
        wins = []
        for size in SIZES:
            times = _row(ranks, size, QUICK if quick else SECONDS)
            found = Ratio.of(times.flushed, times.chimera)
            wins.append((size, found.low > 1))
            simulated = (" / ".join(f"{each:.2f}" for each in both) for both in (times.own_cores, times.these_cores))
            cells = [str(found), str(Ratio.of(times.flushed, times.unsummed)), *simulated]
            cells += [f"{times.most:.2f}", f"{times.cores:.2f}"]
            yield Finding(f"| {ranks} ranks, products of {size} |", " | ".join(cells) + " |")
        yield Finding(f"{ranks} ranks: Chimera is faster", _from(wins))


def _row(ranks: int, size: int, seconds: float) -> Times:
    options = {"size": size, "seconds": seconds}
    found: Times = processes.run_pipeline(measure, Topology(ranks), timeout=580, group_timeout=120, **options)[0]
    return found


def _from(wins: list[tuple[int, bool]]) -> str:
    """From which size on the whole interval lies above 1.

    Example:
        >>> _from([(256, True), (512, False), (1024, True)]), _from([(256, True), (512, False)])
        ('from products of 1024 on', 'with no size')
    """
    lost = max((at for at, (_, won) in enumerate(wins) if not won), default=-1)
    return f"from products of {wins[lost + 1][0]} on" if lost + 1 < len(wins) else "with no size"


def measure(transport: Transport, size: int, seconds: float) -> Times:
    """One row: as many stages and micro-batches as ranks, each stage one weight.

    Args:
        transport: of the ranks.
        size: rows of a micro-batch, and width of the weights.
        seconds: for all rounds.
    """
    costs, cores = _costs(transport, size)
    runs = [
        _batches(transport, family, size, reduce)
        for family, reduce in ((OneFOneB(), True), (Chimera(), True), (Chimera(), False))
    ]
    for _ in range(2):  # the first batches agree on what travels and who holds what
        spent = sum(run() for run in runs)
    rounds = max(FEWEST, min(MOST, int(seconds / spent)))
    found: list[list[float]] = [[], [], []]
    for number in range(rounds):
        for at in range(3):
            which = (at + number) % 3  # in turns, so that what drifts meets all alike
            found[which].append(runs[which]())
    ranks, unsummed = transport.topology.ranks, replace(costs, reduce=0)
    flushed, chimera = (family.build(ranks, ranks) for family in (OneFOneB(), Chimera()))
    own = float(simulate(flushed, unsummed).makespan)
    shared, least = on_cores(flushed, costs, cores), on_cores(chimera, costs, cores)
    sums = 2 * float(at_stage(costs.reduce, 0))  # of both stages of a rank, hidden behind nothing where cores are busy
    work = ranks * ranks * (float(at_stage(costs.forward, 0)) + float(at_stage(costs.backward, 0)))
    return Times(
        found[0],
        found[1],
        found[2],
        own_cores=[own / float(simulate(chimera, each).makespan) for each in (costs, unsummed)],
        these_cores=[shared / (least + each) for each in (sums, 0)],
        most=shared * cores / work,
        cores=cores,
    )


def _costs(transport: Transport, size: int) -> tuple[Costs, float]:
    """The costs of a rank that computes alone, and how many such ranks all together are; the same on all of them."""
    net, part = _network(1, size), torch.randn(size, size)
    transport.barrier()
    found: list[SizeCosts] = transport.all_gather_object(_passes(net, part), transport.topology.everyone)
    together = statistics.mean(each.forward[0] + each.backward[0] for each in found)
    mine = _passes(net, part) if transport.rank == 0 else None
    alone: SizeCosts = transport.all_gather_object(mine, transport.topology.everyone)[0]
    machine = measure_machine(transport, rounds=12, overhead=0.0)
    weight = 4 * size * size
    costs = Costs(
        alone.forward[0],
        alone.backward[0],
        send=machine["message"].message(weight),  # a micro-batch is as large
        reduce=machine["all_reduce"].all_reduce(weight, 2),
    )
    cores = transport.topology.ranks * (alone.forward[0] + alone.backward[0]) / together
    return costs, min(cores, os.cpu_count() or 1)


def _passes(net: nn.Module, part: torch.Tensor) -> SizeCosts:
    return measure_layers(net, ["0"], _loss, part, torch.device("cpu"), rounds=3)[0]


def _network(stages: int, size: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(stages)))


def _loss(net: nn.Module, part: torch.Tensor) -> torch.Tensor:
    """The input needs a gradient, so that the first stage computes as much as the others."""
    loss: torch.Tensor = net(part.requires_grad_()).sum()
    return loss


def _batches(transport: Transport, family: Family, size: int, reduce: bool) -> Callable[[], float]:
    """What runs a batch and returns its seconds, from a barrier to the last rank's end."""
    ranks = transport.topology.ranks
    net = _network(ranks, size)
    pipeline = Pipeline(net, find_layers(net), [1] * ranks, family, transport)
    pipeline.partition()
    parts = list(torch.randn(ranks * size, size).chunk(ranks))

    def batch() -> float:
        net.zero_grad()
        transport.barrier()
        start = time.perf_counter()
        pipeline.train(lambda _, part: _loss(net, part), parts, [1 / ranks] * ranks, reduce=reduce)
        passed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        transport.all_reduce(passed, transport.topology.everyone, "max").wait()
        return float(passed)

    return batch


def on_cores(schedule: Schedule, costs: Costs, cores: float) -> float:
    """Time of a batch whose ranks share cores, each as fast as the others; messages take none.

    Args:
        schedule: the schedule.
        costs: of a rank that computes alone.
        cores: how many.

    Example:
        >>> built = OneFOneB().build(ranks=2, micro_batches=2)
        >>> on_cores(built, Costs(), cores=2), on_cores(built, Costs(), cores=1)
        (9.0, 12.0)
    """
    to_come, done = [deque(order) for order in schedule.actions], set()
    running: dict[int, tuple[float, Action]] = {}
    now = 0.0
    while any(to_come) or running:
        for rank, order in enumerate(to_come):
            need = remote_need(order[0], schedule.stages) if order else None
            if order and rank not in running and (need is None or need in done):
                action = order.popleft()
                running[rank] = float(costs.duration(action)), action
        pace = min(1.0, cores / len(running))
        passed = min(left for left, _ in running.values())
        now += passed / pace
        for rank, (left, action) in list(running.items()):
            running[rank] = left - passed, action
            if left == passed:
                del running[rank]
                done.add(result_of(action))
    return now
