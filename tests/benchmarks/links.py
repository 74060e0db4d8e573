"""Which schedules suffer from a slow network: two hosts of two ranks each, whose cable ``tc`` makes slow."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.simulate import Costs, Link, simulate
from lightning_pipe.transport.arrangement import open_transport
from lightning_pipe.transport.base import Lane, Transport
from lightning_pipe.transport.topology import Topology
from recipes.reproduce.sleeping import Sleeper
from tests.benchmarks.families import UNIT
from tests.benchmarks.measure import Finding
from tests.support import hosts, processes
from tests.support.hosts import Host

RANKS, MICRO_BATCHES = 4, 8
NUMBERS = 1 << 15
"""Of an activation: 128 KiB, which take a hundredth of a second at 100 Mbit/s."""
NAMES = ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble")
SLOW = {
    "1 ms, 100 Mbit/s": ("netem", "delay", "1ms", "rate", "100mbit", "limit", "10000"),
    "100 Mbit/s (no netem in this kernel: no delay)": ("tbf", "rate", "100mbit", "burst", "32kbit", "latency", "4s"),
}
"""What to ask ``tc`` for, best first."""


def run(quick: bool) -> list[Finding]:
    """The time of a batch over the slow cable, beside the simulated one and those without a cable."""
    reasons = {name: hosts.why_not(*discipline) for name, discipline in SLOW.items()}
    shape = next((name for name, reason in reasons.items() if reason is None), None)
    if shape is None:
        return [Finding("not measured", next(iter(reasons.values())) or "")]
    with hosts.joined() as ends:
        for end in ends:
            end.shape(*SLOW[shape])
        call = {"ends": ends, "names": NAMES, "rounds": 2 if quick else 5}
        measured = processes.results(processes.outcomes(_on_host, RANKS, timeout=300, group_timeout=None, call=call))[0]
    link: Link = measured.pop("link")
    beside = f"{1e3 * float(link.alpha):.2f} ms, {8e-6 / float(link.beta):.0f} Mbit/s"
    return [Finding(f"link, {shape}", f"measured {beside}"), *(_finding(n, t, link) for n, t in measured.items())]


def _finding(name: str, seconds: float, link: Link) -> Finding:
    slow, free = (_simulated(name, each) for each in (link, Link()))
    return Finding(
        f"{name}, {RANKS} ranks on 2 hosts, {MICRO_BATCHES} micro-batches",
        f"{seconds:.3f} s, simulated {slow:.3f} s",
        f"{seconds / free:.2f} x without network, simulated {slow / free:.2f} x",
    )


def _simulated(name: str, link: Link) -> float:
    schedule = schedules.get(name).build(RANKS, MICRO_BATCHES)
    share = RANKS / schedule.stages
    ranks = [schedule.placement[0, stage] for stage in range(schedule.stages)]
    crosses = [a // 2 != b // 2 for a, b in zip(ranks, [*ranks[1:], ranks[-1]], strict=True)]
    send = [float(link.message(4 * NUMBERS)) if each else 0.0 for each in crosses]
    unit = UNIT[RANKS] * share
    costs = Costs(unit, 2 * unit, unit, unit, send=send, links="directed")
    return float(simulate(schedule, costs).makespan)


def _on_host(process: int, call: dict[str, Any]) -> dict[str, Any]:
    """A rank: rows 0 and 1 of a schedule on one host, rows 2 and 3 on the other."""
    ends: Sequence[Host] = call["ends"]
    ends[process // 2].enter()
    os.environ["MASTER_ADDR"] = ends[0].address
    dist.init_process_group("gloo", rank=process, world_size=RANKS, timeout=timedelta(seconds=60))
    transport = open_transport(Topology(RANKS, node_size=2), torch.device("cpu"), timedelta(seconds=60))
    found: dict[str, Any] = {"link": _measured_link(transport)}
    for name in call["names"]:
        found[name] = _batch(transport, name, call["rounds"])
    transport.barrier()
    transport.close()
    dist.destroy_process_group()
    return found


def _measured_link(transport: Transport) -> Link:
    """From rank 1 to rank 2 and back, of little and of much."""
    times = []
    for size in (1, 4 * NUMBERS):
        data = torch.zeros(size, dtype=torch.uint8)
        rounds = []
        for _ in range(5):
            transport.barrier()
            start = time.perf_counter()
            if transport.rank == 1:
                transport.send(data, 2, Lane("forward")).wait()
                transport.receive(data, 2, Lane("backward")).wait()
            elif transport.rank == 2:
                transport.receive(data, 1, Lane("forward")).wait()
                transport.send(data, 1, Lane("backward")).wait()
            rounds.append((time.perf_counter() - start) / 2)
        times.append(transport.all_gather_object(statistics.median(rounds), tuple(range(RANKS)))[1])
    alpha, whole = times
    return Link(alpha, max(1e-12, (whole - alpha) / (4 * NUMBERS)))


def _batch(transport: Transport, name: str, rounds: int) -> float:
    """Median seconds of a batch from the last rank's arrival to the last rank's end."""
    family = schedules.get(name)
    stages = family.build(RANKS, MICRO_BATCHES).stages
    # layers whose backward pass has two halves, as the simulated one: zero bubble sends behind the first half
    unit = UNIT[RANKS] * RANKS / stages
    module = nn.Sequential(*(Sleeper(unit, unit) for _ in range(stages)))
    pipeline = Pipeline(module, find_layers(module), [1] * stages, family, transport)
    pipeline.partition()
    parts = [torch.ones(1, NUMBERS) for _ in range(MICRO_BATCHES)]
    everyone, spans = tuple(range(RANKS)), []
    for number in range(rounds + 2):
        transport.barrier()
        arrived = time.monotonic()
        step, weights = (lambda _, part: module(part.requires_grad_()).sum()), [1 / MICRO_BATCHES] * MICRO_BATCHES
        pipeline.train(step, parts, weights, seed=number)
        times = transport.all_gather_object((arrived, time.monotonic()), everyone)
        spans.append(max(end for _, end in times) - max(start for start, _ in times))
    return statistics.median(spans[2:])  # the first batches agree on what travels and who holds what
