"""Chimera beside 1F1B with real matrix products: where fewer bubbles are worth the sums over the copies of a stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.schedules import Chimera, Family, OneFOneB
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology
from tests.benchmarks.measure import Finding, Ratio, batch_seconds
from tests.support import processes

SIZES, RANKS = (256, 512, 1024, 2048), (2, 4)
SECONDS, QUICK = 45.0, 8.0
"""For the measured batches of a row."""

FEWEST, MOST = 5, 200
"""Rounds of a row."""


def run(quick: bool) -> Iterator[Finding]:
    """A row for every size and number of ranks, and from which size on Chimera wins."""
    yield Finding("| speed of Chimera over 1F1B |", "with sums | without sums |")
    for ranks in RANKS:
        wins = []
        for size in SIZES:
            options = {"size": size, "seconds": QUICK if quick else SECONDS}
            row = processes.run_pipeline(measure, Topology(ranks), timeout=580, group_timeout=120, **options)[0]
            flushed, chimera, unsummed = row
            found = Ratio.of(flushed, chimera)
            wins.append((size, found.low > 1))
            yield Finding(f"| {ranks} ranks, products of {size} |", f"{found} | {Ratio.of(flushed, unsummed)} |")
        yield Finding(f"{ranks} ranks: Chimera is faster", _from(wins))


def _from(wins: list[tuple[int, bool]]) -> str:
    """From which size on the whole interval lies above 1.

    Example:
        >>> _from([(256, True), (512, False), (1024, True)]), _from([(256, True), (512, False)])
        ('from products of 1024 on', 'with no size')
    """
    lost = max((at for at, (_, won) in enumerate(wins) if not won), default=-1)
    return f"from products of {wins[lost + 1][0]} on" if lost + 1 < len(wins) else "with no size"


def measure(transport: Transport, size: int, seconds: float) -> list[list[float]]:
    """Seconds of batches of 1F1B, of Chimera, and of Chimera without the sums over the copies of a stage.

    There are as many stages and micro-batches as ranks, and each stage is one weight.

    Args:
        transport: of the ranks.
        size: rows of a micro-batch, and width of the weights.
        seconds: for all rounds.
    """
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
    return found


def _batches(transport: Transport, family: Family, size: int, reduce: bool) -> Callable[[], float]:
    """What runs a batch and returns its seconds, from a barrier to the last rank's end."""
    ranks = transport.topology.ranks
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(ranks)))
    pipeline = Pipeline(net, find_layers(net), [1] * ranks, family, transport)
    pipeline.partition()
    # The input needs a gradient, so that the first stage computes as much as the others.
    parts = list(torch.randn(ranks * size, size).chunk(ranks))

    def batch() -> None:
        pipeline.train(lambda _, part: net(part.requires_grad_()).sum(), parts, [1 / ranks] * ranks, reduce=reduce)

    def measured() -> float:
        net.zero_grad()
        return batch_seconds(transport, batch)

    return measured
