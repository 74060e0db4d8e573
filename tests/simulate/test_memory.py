"""Memory over time against the counters of activations and versions, and against the published formulas."""

from __future__ import annotations

import pytest

from lightning_pipe import schedules
from lightning_pipe.schedules import GPipe, OneFOneB, with_recompute
from lightning_pipe.simulate import Memory, memory_over_time, peak, simulate


@pytest.mark.parametrize("name", schedules.names())
def test_peaks_are_those_of_the_counters(name: str) -> None:
    schedule = schedules.get(name).build(4, 8)
    held = memory_over_time(schedule, Memory(weights=10, activations=1, optimizer=7))
    stages = [len(schedule.stages_of(rank)) for rank in range(4)]
    assert tuple(max(point.activations for point in points) for points in held) == simulate(schedule).peak_activations
    versions = [max(p.weights for p in points) for points in memory_over_time(schedule, Memory(weights=10))]
    assert versions == [10 * n * v for n, v in zip(stages, schedule.weight_versions, strict=True)]
    assert [peak(points).optimizer for points in held] == [7 * n for n in stages]


def test_everything_is_let_go_at_the_end() -> None:
    schedule = OneFOneB().build(4, 8)
    memory = Memory(weights=10, gradients=5, optimizer=3, activations=2)
    for points in memory_over_time(schedule, memory):
        assert points[0].total == 13
        assert points[-1].activations == 0
        assert points[-1].gradients == 5
        assert all(value >= 0 for point in points for value in point)


def test_recomputation_keeps_inputs() -> None:
    """GPipe and PipeDream-2BW with recomputation, ICML'21, section 3: exact but for the stage's own input.

    The formulas, ``|W| / d + |A_total(b)| / d + m |A_input(b)|`` and ``2 |W| / d + |A_total(b)| / d + d |A_input(b)|``,
    count the input of the micro-batch that is being recomputed twice.
    """
    memory = Memory(weights=20, gradients=0, optimizer=0, activations=10, inputs=3)
    schedule = with_recompute(GPipe().build(4, 8), "always")
    first = peak(memory_over_time(schedule, memory)[0])
    assert first.total == 20 + 10 + 8 * 3 - 3
    schedule = with_recompute(schedules.get("pipedream_2bw").build(4, 24), "always")
    first = peak(memory_over_time(schedule, memory)[0])
    assert first.total == 2 * 20 + 10 + 4 * 3 - 3
