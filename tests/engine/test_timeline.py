"""Plan and measured timeline name the same ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.planning.division import Division
from lightning_pipe.planning.make import assembled
from lightning_pipe.simulate.style import row_names
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology
from tests.support.threads import run_threads, thread_world


def timeline_and_plan(transport: Transport, schedule: str) -> tuple[tuple[str, ...], list[tuple[int, tuple[int, ...]]]]:
    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(2)))
    pipeline = Pipeline(module, find_layers(module), [1, 1], schedules.get(schedule), transport)

    def step(_: int, part: Tensor) -> Tensor:
        loss: Tensor = module(part).square().mean()
        return loss

    with pipeline.recorded() as events:
        pipeline.train(step, [torch.ones(2, 3)] * 2, [0.5] * 2)
    layout = (pipeline.layers, pipeline.balance, pipeline.placement, transport.topology)
    made = assembled(module, *layout, schedule, None, division=Division(), on_device=False)
    return row_names(pipeline.timeline(events)), [(one.stage, one.ranks) for one in made.stages]


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        ("1f1b", ("rank 1: stage 0", "rank 0: stage 1")),
        ("chimera", ("rank 1: stages 0 1", "rank 0: stages 1 0")),
    ],
)
def test_plan_and_timeline_agree(schedule: str, rows: tuple[str, ...]) -> None:
    topology = Topology(2, 1, schedules.get(schedule).build(2, 2).loss_ranks[0])
    for names, planned in run_threads(thread_world(topology), partial(timeline_and_plan, schedule=schedule)):
        assert names == rows
        for stage, ranks in planned:
            assert set(ranks) == {int(row[5]) for row in rows if str(stage) in row.split(": ")[1]}
