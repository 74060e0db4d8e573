"""Schedules drawn at random: any placement, several pipes, any order; always valid, always exact."""

from __future__ import annotations

import copy

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_pipe.schedules import Schedule
from lightning_pipe.schedules.family import schedule_of
from lightning_pipe.simulate import Costs, simulate
from tests.support.engine_runs import assert_same
from tests.support.random_orders import random_order
from tests.support.small_net import Scaled, batch


@st.composite
def random_schedules(draw: st.DrawFn) -> Schedule:
    """Stages anywhere, also twice where there are two pipes; every rank has something to do."""
    ranks, pipes = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    stages = draw(st.integers(ranks, 4))
    micro_batches = draw(st.integers(pipes, 5))
    anywhere = st.integers(0, ranks - 1)
    placement = {(pipe, stage): draw(anywhere) for pipe in range(pipes) for stage in range(stages)}
    for rank, stage in enumerate(draw(st.permutations(range(stages)))[:ranks]):
        placement[0, stage] = rank
    order = random_order(placement, ranks, stages, micro_batches, draw(st.randoms()))
    schedule = schedule_of("random", order, micro_batches=micro_batches)
    schedule.validate()
    return schedule


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(random_schedules(), st.sampled_from(["never", "except_last", "always"]), st.integers(1, 9), st.integers(1, 9))
def test_random_schedules_equal_one_device(schedule: Schedule, recompute: str, forward: int, backward: int) -> None:
    work = (forward + backward) * schedule.micro_batches * schedule.stages
    timeline = simulate(schedule, Costs(forward=forward, backward=backward))
    assert work <= timeline.makespan * schedule.ranks
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        data = [batch(2 * schedule.micro_batches + 1) for _ in range(2)]
        assert_same(
            copy.deepcopy(Scaled()),
            data,
            micro_batches=schedule.micro_batches,
            ranks=schedule.ranks,
            stages=schedule.stages,
            schedule=schedule,
            layers="layers",
            recompute=recompute,
        )
    finally:
        torch.set_default_dtype(torch.float32)
