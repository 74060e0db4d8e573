"""Predicted against measured step times of twelve configurations, and how good the predicted best one is.

The costs are measured with micro-batches of 1 and 8 samples, one rank at a time in order and one micro-batch after the
other; the configurations have micro-batches of 2 and 4 samples under six other schedules. All twelve are run in turns.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.planning.cost_profile import CostProfile, merged
from lightning_pipe.planning.prediction import Configuration, Predictor
from lightning_pipe.planning.search import search
from lightning_pipe.profiling.measure import measure_profile
from lightning_pipe.simulate import Link
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology
from recipes.reproduce.sleeping import _Sleep
from tests.benchmarks.measure import Finding, batch_seconds
from tests.planning.test_search import profile as profile_of
from tests.support import processes

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "chimera", "dualpipev")
CALIBRATED, MICRO_BATCHES, BATCH = (1, 8), (4, 8), 16
ERROR, CHOICE = 0.10, 0.05
LAYERS = 8
UNIT = 0.004
"""Seconds that a layer sleeps forward for each sample; backward twice as long, in two halves."""


class Found(NamedTuple):
    """One configuration: its predicted time, and the measured ones of all rounds."""

    label: str
    predicted: float
    measured: list[float]


class _Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        unit = UNIT * len(x)
        out: Tensor = _Sleep.apply(x, unit, unit) * _Sleep.apply(self.scale, 0.0, unit)
        return out


def sleeping() -> tuple[nn.Module, Any, Callable[[nn.Module, Any], Any]]:
    """Layers that need no core, a batch, and the step."""
    net = nn.Sequential(*(_Sleeper() for _ in range(LAYERS)))
    return net, torch.ones(BATCH, 16), lambda module, part: module(part.requires_grad_()).sum()


def transformer() -> tuple[nn.Module, Any, Callable[[nn.Module, Any], Any]]:
    """GPT-2 with small blocks, a batch, and the step."""
    from recipes.models.gpt2 import gpt2

    torch.manual_seed(0)
    model = gpt2(vocabulary=1000, positions=32, width=128, layers=LAYERS, heads=4)
    tokens = torch.randint(1000, (BATCH, 32))
    return model, tokens, lambda module, part: module(input_ids=part, labels=part).loss


def measure(transport: Transport, kind: str, rounds: int, repeats: int) -> list[Found]:
    """Calibrate, then run all configurations in turns. The same on all ranks."""
    warnings.simplefilter("ignore")
    make = {"sleeping": sleeping, "transformer": transformer}[kind]
    module, batch, step = make()
    options = {"micro_batch_sizes": CALIBRATED, "step": step, "rounds": 3}
    profiles = [measure_profile(transport, module, batch, **options)]
    runs = [_Run(transport, name, number, make) for number in MICRO_BATCHES for name in SCHEDULES]
    for _ in range(2):  # the first batches agree on what travels and who holds what
        for each in runs:
            each.batch()
    # In turns with the calibration, so that what drifts on a busy machine meets both alike.
    for number in range(rounds):
        for each in runs:
            # a run of its own finds its weights in the caches, after others it does not
            each.measured.append([each.batch() for _ in range(repeats)][-1])
        if number % 4 == 2:
            profiles.append(measure_profile(transport, module, batch, **options))
    predictor = Predictor(together(profiles))
    return [Found(each.one.label, predictor.seconds(each.one), each.measured) for each in runs]


def together(profiles: list[CostProfile]) -> CostProfile:
    """The median of several calibrations; there is no optimizer."""

    def median(link: str) -> Link:
        links = [getattr(profile, link) for profile in profiles]
        return Link(statistics.median([each.alpha for each in links]), statistics.median([each.beta for each in links]))

    batch = statistics.median([profile.batch for profile in profiles])
    links = {"message": median("message"), "all_reduce": median("all_reduce")}
    return replace(merged(profiles), step_per_byte=0.0, batch=batch, **links)


class _Run:
    """One configuration at work."""

    def __init__(self, transport: Transport, name: str, number: int, make: Callable[[], Any]) -> None:
        family, ranks = schedules.get(name), transport.topology.ranks
        stages = ranks * family.stages_per_rank
        counts = (LAYERS // stages,) * stages
        self.one = Configuration(family, ranks, 1, stages, number, BATCH // number, layers=counts)
        self.module, batch, self.step = make()
        self.pipeline = Pipeline(self.module, find_layers(self.module), list(counts), family, transport)
        self.pipeline.partition()
        self.parts = list(batch.chunk(number))
        self.measured: list[float] = []

    def batch(self) -> float:
        """Seconds from the barrier to the last rank's end."""
        number = len(self.parts)
        seconds = batch_seconds(
            self.pipeline.transport,
            lambda: self.pipeline.train(
                lambda _, part: self.step(self.module, part), self.parts, [1 / number] * number
            ),
        )
        self.module.zero_grad()
        return seconds


def run(quick: bool) -> list[Finding]:
    """Sleeping layers on two and four ranks, GPT-2 on two; on four ranks of two cores GPT-2 has no target."""
    findings = searches()
    # A round of sleeping layers takes ten seconds, one of transformers two: what disturbs the machine must not last
    # for half of the rounds.
    for kind, ranks, rounds, repeats, target in (
        ("sleeping", 2, 3 if quick else 7, 1, True),
        ("sleeping", 4, 3 if quick else 7, 1, True),
        ("transformer", 2, 11 if quick else 31, 3, True),
        ("transformer", 4, 5 if quick else 11, 3, False),
    ):
        options = {"kind": kind, "rounds": rounds, "repeats": repeats}
        found = processes.run_pipeline(measure, Topology(ranks), timeout=900, group_timeout=300, **options)[0]
        findings += report(f"{kind}, {ranks} ranks", found, target=target)
    return findings


def searches() -> list[Finding]:
    """How long a search takes: in every arrangement, in pipelines of 32, and where little fits into the memory."""
    findings, limit, roomy = [], 10.0, 16e9
    for ranks, batch, size, memory in ((64, 512, None, roomy), (4096, 4096, 32, roomy), (4096, 4096, None, 4e8)):
        start = time.process_time()
        found = search(profile_of(64), ranks, batch, memory=memory, pipeline_parallel_size=size)
        seconds = time.process_time() - start
        shape = ("" if size is None else f" in pipelines of {size}") + ", 0.4 GB" * (memory < roomy)
        findings.append(
            Finding(
                f"search, {ranks} ranks{shape}, {found.considered} configurations",
                f"{seconds:.1f} s of processor time",
                f"at most {limit:.0f} s",
                seconds <= limit,
            )
        )
    return findings


def report(name: str, found: list[Found], *, target: bool) -> list[Finding]:
    """Every configuration, the median error, and the choice."""
    times = [statistics.median(each.measured) for each in found]
    errors = [abs(each.predicted / seconds - 1) for each, seconds in zip(found, times, strict=True)]
    chosen = min(range(len(found)), key=lambda number: found[number].predicted)
    worse = times[chosen] / min(times) - 1
    error = statistics.median(errors)
    return [
        *(
            Finding(
                f"{name}: {each.label}",
                f"{1000 * seconds:.0f} ms, predicted {1000 * each.predicted:.0f} ms "
                f"({100 * (each.predicted / seconds - 1):+.1f} %)",
            )
            for each, seconds in zip(found, times, strict=True)
        ),
        Finding(
            f"{name}: median error of {len(found)} step times",
            f"{100 * error:.1f} %",
            f"at most {100 * ERROR:.0f} %" if target else "",
            error <= ERROR if target else None,
        ),
        Finding(
            f"{name}: {found[chosen].label.split(', 2 ranks')[0].split(', 4 ranks')[0]} over the fastest",
            f"{100 * worse:.1f} % slower",
            f"at most {100 * CHOICE:.0f} %" if target else "",
            worse <= CHOICE if target else None,
        ),
    ]
