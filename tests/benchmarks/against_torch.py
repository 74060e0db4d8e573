"""Samples per second over those of torch.distributed.pipelining: same blocks, same processes, in turns."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.schedules import DualPipeV, Family, GPipe, Interleaved, OneFOneB, Schedule, ZeroBubble
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology
from tests.benchmarks.measure import Finding, Ratio, alternate, batch_seconds
from tests.support import processes

RANKS, BLOCKS, MICRO_BATCHES = 2, 8, 8
SIZES = {"small (width 128, micro-batch 16)": (128, 16), "medium (width 512, micro-batch 32)": (512, 32)}
LOWER = 0.97


class Pair(NamedTuple):
    """One schedule on both sides.

    Args:
        theirs: torch's class.
        ours: the family of the same order; ``None``: torch's own order, by way of its CSV file.
        stages_per_rank: stages on each rank.
        v_shaped: whether they lie in the shape of a V.
    """

    theirs: Any
    ours: Family | None
    stages_per_rank: int = 1
    v_shaped: bool = False

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank."""
        if self.v_shaped:
            return [rank, 2 * RANKS - 1 - rank]
        return [rank + turn * RANKS for turn in range(self.stages_per_rank)]


PAIRS = {
    "gpipe": Pair(ScheduleGPipe, GPipe()),
    "1f1b": Pair(Schedule1F1B, OneFOneB()),
    "interleaved": Pair(ScheduleInterleaved1F1B, Interleaved(), 2),
    "interleaved zero bubble": Pair(ScheduleInterleavedZeroBubble, None, 2),
    "zero bubble V": Pair(ScheduleZBVZeroBubble, ZeroBubble("v"), 2, v_shaped=True),
    "DualPipeV": Pair(ScheduleDualPipeV, DualPipeV(), 2, v_shaped=True),
}


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
    for family in PAIRS:
        for size, (width, samples) in SIZES.items():
            rounds = (20 if quick else 60) * (4 if width < 256 else 1)
            options = {"family": family, "width": width, "samples": samples, "rounds": rounds}
            ours, theirs = processes.run_pipeline(compare, Topology(RANKS), timeout=280, group_timeout=60, **options)[0]
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
    pair = PAIRS[family]
    theirs, order = yardstick(transport, copy.deepcopy(blocks), pair, x, y)

    with ExitStack() as lasting:
        ours = engine(transport, copy.deepcopy(blocks), pair.ours or schedules.get(order), x, y, lasting)
        for _ in range(3):
            ours()
            theirs()
        return alternate(partial(batch_seconds, transport, ours), partial(batch_seconds, transport, theirs), rounds)


def engine(
    transport: Transport, blocks: nn.Sequential, family: Family, x: Tensor, y: Tensor, lasting: ExitStack
) -> Callable[[], None]:
    """One optimizer step of this package."""
    stages = family.build(RANKS, MICRO_BATCHES).stages
    pipeline = Pipeline(blocks, find_layers(blocks), [BLOCKS // stages] * stages, family, transport)
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

    lasting.enter_context(pipeline.executor.stages.interceptor.torch_patched())  # as the strategy does
    return batch


def yardstick(
    transport: Transport, blocks: nn.Sequential, pair: Pair, x: Tensor, y: Tensor
) -> tuple[Callable[[], None], Schedule | None]:
    """One optimizer step of torch.distributed.pipelining, with all shapes given, its fastest way; and its order."""
    rank, total = transport.rank, RANKS * pair.stages_per_rank
    bounds = list(pairwise([0, *accumulate([BLOCKS // total] * total)]))
    part = x.chunk(MICRO_BATCHES)[0]
    modules = {index: blocks[slice(*bounds[index])] for index in pair.stages_of(rank)}
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
    single = pair.stages_per_rank == 1
    schedule = pair.theirs(stages[0] if single else stages, MICRO_BATCHES, loss_fn=functional.mse_loss)
    optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], lr=1e-3)

    def batch() -> None:
        optimizer.zero_grad()
        arguments = (x,) if 0 in modules else ()
        targets = {"target": y, "losses": []} if total - 1 in modules else {}
        schedule.step(*arguments, **targets)
        optimizer.step()

    return batch, None if pair.ours else _order_of(schedule)


def _order_of(schedule: Any) -> Schedule:
    """Torch's compute order, by way of the file that both can read and write."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.csv"
        rows = ([str(action) if action else "" for action in schedule.pipeline_order[rank]] for rank in range(RANKS))
        path.write_text("".join(",".join(row) + "\n" for row in rows))
        return schedules.read_csv(path)
