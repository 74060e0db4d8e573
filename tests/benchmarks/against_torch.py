"""Samples per second over those of torch.distributed.pipelining: same blocks, same processes, in turns."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn import functional

from lightning_pipe import schedules
from lightning_pipe.partition import find_layers
from lightning_pipe.pipeline.runner import Pipeline
from lightning_pipe.pipeline.topology import Topology
from lightning_pipe.pipeline.transport import Transport
from tests import launch
from tests.benchmarks.measure import Finding, Ratio, alternate

RANKS, BLOCKS, MICRO_BATCHES = 2, 8, 8
SIZES = {"small (width 128, micro-batch 16)": (128, 16), "medium (width 512, micro-batch 32)": (512, 32)}
LOWER = 0.97
FAMILIES = ("gpipe", "1f1b", "interleaved")


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rise = nn.Linear(width, 2 * width)
        self.fall = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.fall(functional.gelu(self.rise(self.norm(x))))
        return out


def run(quick: bool) -> list[Finding]:
    """The ratio for every family and size."""
    findings = []
    for family in FAMILIES:
        for size, (width, samples) in SIZES.items():
            rounds = (20 if quick else 60) * (4 if width < 256 else 1)
            options = {"family": family, "width": width, "samples": samples, "rounds": rounds}
            ours, theirs = launch.run_pipeline(compare, Topology(RANKS), timeout=280, group_timeout=60, **options)[0]
            ratio = Ratio.of(theirs, ours)
            findings.append(
                Finding(f"{family}, {size}", str(ratio), f"interval not below {LOWER}", ratio.high >= LOWER)
            )
    return findings


def compare(
    transport: Transport, family: str, width: int, samples: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds per batch, ours and torch's, of the slower rank."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(width) for _ in range(BLOCKS)))
    x, y = torch.randn(2, MICRO_BATCHES * samples, width)
    ours = engine(transport, copy.deepcopy(blocks), family, x, y)
    theirs = yardstick(transport, copy.deepcopy(blocks), family, x, y)

    def timed(batch: Callable[[], None]) -> Callable[[], float]:
        def measure() -> float:
            transport.barrier()
            start = time.perf_counter()
            batch()
            seconds = torch.tensor(time.perf_counter() - start)
            transport.all_reduce(seconds, (0, 1), "max").wait()
            return float(seconds)

        return measure

    for _ in range(3):
        ours()
        theirs()
    return alternate(timed(ours), timed(theirs), rounds)


def engine(transport: Transport, blocks: nn.Sequential, family: str, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One optimizer step of this package."""
    built = schedules.get(family)
    stages = RANKS * built.stages_per_rank
    pipeline = Pipeline(blocks, find_layers(blocks), [BLOCKS // stages] * stages, built, transport)
    pipeline.partition()
    optimizer = torch.optim.SGD([parameter for _, parameter in pipeline.local_parameters()], lr=1e-3)
    parts = list(zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True))
    weights = [1 / MICRO_BATCHES] * MICRO_BATCHES

    def step(_: int, part: tuple[Tensor, Tensor]) -> Tensor:
        return functional.mse_loss(blocks(part[0]), part[1])

    def batch() -> None:
        optimizer.zero_grad()
        pipeline.train(step, parts, weights)
        optimizer.step()

    return batch


def yardstick(transport: Transport, blocks: nn.Sequential, family: str, x: Tensor, y: Tensor) -> Callable[[], None]:
    """One optimizer step of torch.distributed.pipelining, with all shapes given, which is its fastest way."""
    rank = transport.rank
    stages_here = 2 if family == "interleaved" else 1
    total = RANKS * stages_here
    bounds = list(pairwise([0, *accumulate([BLOCKS // total] * total)]))
    part = x.chunk(MICRO_BATCHES)[0]
    modules = {index: blocks[slice(*bounds[index])] for index in range(rank, total, RANKS)}
    stages = [
        PipelineStage(
            module,
            index,
            total,
            torch.device("cpu"),
            input_args=(part.clone().requires_grad_(index > 0),),
            output_args=(part.clone().requires_grad_(),),
        )
        for index, module in modules.items()
    ]
    schedule = _schedule(family, stages)
    optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], lr=1e-3)

    def batch() -> None:
        optimizer.zero_grad()
        arguments = (x,) if rank == 0 else ()
        targets = {"target": y, "losses": []} if rank == dist.get_world_size() - 1 else {}
        schedule.step(*arguments, **targets)
        optimizer.step()

    return batch


def _schedule(family: str, stages: Sequence[PipelineStage]) -> ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B:
    if family == "interleaved":
        return ScheduleInterleaved1F1B(list(stages), MICRO_BATCHES, loss_fn=functional.mse_loss)
    kind = ScheduleGPipe if family == "gpipe" else Schedule1F1B
    return kind(stages[0], MICRO_BATCHES, loss_fn=functional.mse_loss)
