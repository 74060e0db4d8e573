"""What GPipe's additions cost and gain: recomputation, its early start, balance by measured time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import divide, find_layers
from lightning_pipe.profiling.measure import measure_profile
from lightning_pipe.schedules.passes.recompute import with_recompute
from lightning_pipe.simulate import Costs, simulate
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.single_process import SingleProcess
from lightning_pipe.transport.topology import Topology
from recipes.reproduce.sleeping import Sleeper
from tests.benchmarks.measure import Finding, Ratio, alternate, batch_seconds
from tests.support import processes

RANKS = 4
MICRO_BATCHES = 8
UNIT = 0.01
# Forward times in units of UNIT: the first cells work on large images, as AmoebaNet's do.
LOPSIDED = (6, 5, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1)


def run(quick: bool) -> list[Finding]:
    """All three."""
    return [_cost_of_recomputation(quick), _early_recomputation(quick), *_balance(quick)]


# ---------------------------------------------------------------------- recomputation on one device


def _cost_of_recomputation(quick: bool) -> Finding:
    """Two micro-batches on one device, the first computed again: 6 units of work instead of 7."""
    torch.set_num_threads(1)
    runs = {mode: _dense(mode) for mode in ("never", "except_last")}
    rounds = 9 if quick else 31
    ratio = Ratio.of(*alternate(runs["never"], runs["except_last"], rounds))
    expected = 3 / 3.5
    return Finding(
        "throughput with except_last, two micro-batches, one device",
        f"{ratio} of that without",
        f"{expected:.3f} within 5 %",
        abs(ratio.median / expected - 1) <= 0.05,
    )


def _dense(mode: Any) -> Any:
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(768, 768), nn.ReLU())))
    transport = SingleProcess()
    layers = find_layers(net)
    pipeline = Pipeline(net, layers, [len(layers)], schedules.GPipe(), transport, recompute=mode)
    # Input that needs a gradient: otherwise the first layer's backward pass is cheaper than the others'.
    parts = list(torch.randn(512, 768, requires_grad=True).tensor_split(2))

    def once() -> float:
        net.zero_grad()
        start = time.perf_counter()
        pipeline.train(lambda _, part: net(part.detach().requires_grad_()).sum(), parts, [0.5, 0.5])
        return time.perf_counter() - start

    once()
    return once


# ---------------------------------------------------------------------- layers that sleep


def _makespans(
    transport: Transport,
    seconds: Sequence[float],
    balance: Sequence[int],
    schedule: str,
    recompute: Literal["never", "always"],
    rounds: int,
    ratio: float = 2.0,
) -> list[float]:
    """Seconds of every round."""
    net = nn.Sequential(*(Sleeper(each, ratio * each / 2) for each in seconds))
    pipeline = Pipeline(net, find_layers(net), balance, schedules.get(schedule), transport, recompute=recompute)
    pipeline.partition()
    parts = [torch.ones(1, 4, requires_grad=True) for _ in range(MICRO_BATCHES)]

    def batch() -> None:
        pipeline.train(lambda _, part: net(part).sum(), parts, [1 / MICRO_BATCHES] * MICRO_BATCHES)

    found = [batch_seconds(transport, batch) for _ in range(rounds + 2)]
    return found[2:]  # the first batches agree on what travels and who holds what


def _measured(rounds: int, **options: Any) -> float:
    found = processes.run_pipeline(_makespans, Topology(RANKS, loss_rank=-1), timeout=200, rounds=rounds, **options)
    return statistics.median(found[0])


def _simulated(schedule: str, costs: Costs, recompute: Literal["never", "always"] = "never") -> float:
    built = schedules.get(schedule).build(RANKS, MICRO_BATCHES)
    return float(simulate(with_recompute(built, recompute), costs).makespan)


def _early_recomputation(quick: bool) -> Finding:
    """Recomputation starts before the gradient arrives: in GPipe's order all ranks but the last have time for it.

    Beside it layers whose backward passes take as long as both together, as if it began when the gradient is there.
    """
    unit = 0.03
    options: dict[str, Any] = {"seconds": [unit] * RANKS, "balance": [1] * RANKS, "schedule": "gpipe"}
    rounds = 2 if quick else 5
    early = _measured(rounds, recompute="always", **options)
    late = _measured(rounds, recompute="never", ratio=3.0, **options)
    simulated = (
        _simulated("gpipe", Costs(unit, 2 * unit, recompute=unit), "always"),
        _simulated("gpipe", Costs(unit, 3 * unit)),
    )
    expected = simulated[0] / simulated[1]
    return Finding(
        f"GPipe with recomputation, {RANKS} ranks, {MICRO_BATCHES} micro-batches",
        f"{early:.3f} s, late {late:.3f} s: {early / late:.3f}",
        f"{simulated[0]:.3f} s, {simulated[1]:.3f} s: {expected:.3f} within 3 %",
        abs(early / late / expected - 1) <= 0.03,
    )


def _balance(quick: bool) -> list[Finding]:
    seconds = [UNIT * each for each in LOPSIDED]
    net = nn.Sequential(*(Sleeper(each, each) for each in seconds))
    layers = find_layers(net)
    equal = [len(LOPSIDED) // RANKS] * RANKS
    balanced = divide(net, layers, RANKS, "time", _profile(net))
    rounds = 2 if quick else 5
    times = {
        str(balance): _measured(rounds, seconds=seconds, balance=balance, schedule="1f1b", recompute="never")
        for balance in (equal, balanced)
    }
    predicted = _simulated("1f1b", _costs(balanced, seconds))
    gain = times[str(equal)] / times[str(balanced)]
    return [
        Finding(f"speed of {balanced} over {equal}", f"{gain:.2f}", "at least 1.3", gain >= 1.3),
        Finding(
            f"time of a batch with {balanced}",
            f"{times[str(balanced)]:.3f} s, predicted {predicted:.3f} s",
            "within 10 %",
            abs(times[str(balanced)] / predicted - 1) <= 0.1,
        ),
    ]


def _profile(net: nn.Module) -> list[float]:
    """Measured seconds of each layer."""
    batch = torch.ones(1, 4, requires_grad=True)
    return measure_profile(SingleProcess(), net, batch, micro_batch_sizes=[1], rounds=1).layer_costs("time")


def _costs(balance: Sequence[int], seconds: Sequence[float]) -> Costs:
    bounds = [sum(balance[:stage]) for stage in range(len(balance) + 1)]
    forward = [sum(seconds[a:b]) for a, b in pairwise(bounds)]
    return Costs(forward, [2 * each for each in forward])
