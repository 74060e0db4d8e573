"""The plan of a module with batch norm says how many samples each norm sees, and what that costs."""

from __future__ import annotations

import pytest
from torch import nn

import lightning_pipe
from lightning_pipe.errors import ScheduleError
from lightning_pipe.planning.batch_norms import is_normalising, norms_note


def net(norms: int = 2, kind: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(norms) for part in (nn.Linear(4, 4), kind(4))), nn.Linear(4, 4))


def bubble(micro_batches: int) -> float:
    return 1 / (1 + micro_batches)


@pytest.mark.parametrize(
    ("sizes", "chosen", "expected"),
    [
        (
            [16],
            True,
            '2 batch norms see the whole batch of 16, as on one device; micro_batches="auto" leaves them 16; predicted '
            "bubble 50.0%, with micro_batches=8 11.1% and 2 samples",
        ),
        (
            [16, 16],
            True,
            "2 batch norms see 16 samples at a time, with micro_batches=1 all 32, as on one device; "
            'micro_batches="auto" leaves them 16; predicted bubble 33.3%, with micro_batches=8 11.1% and 4 samples',
        ),
        ([2] * 8, False, "2 batch norms see 2 samples at a time, with micro_batches=1 all 16, as on one device"),
        (
            [3, 2],
            False,
            "2 batch norms see 2 to 3 samples at a time, with micro_batches=1 all 5, as on one device; predicted "
            "bubble 33.3%, with micro_batches=5 16.7% and 1 samples",
        ),
        ([16], False, None),
        ([1], True, None),
    ],
)
def test_the_line(sizes: list[int], chosen: bool, expected: str | None) -> None:
    assert norms_note(net(), sizes, 2, bubble, chosen) == (() if expected is None else (expected,))


def test_nothing_is_said_of_norms_that_use_running_statistics() -> None:
    assert norms_note(net().eval(), [2] * 8, 2, bubble, False) == ()
    assert norms_note(net(0), [2] * 8, 2, bubble, False) == ()
    assert is_normalising(nn.SyncBatchNorm(4))
    assert is_normalising(nn.BatchNorm1d(4, track_running_stats=False).eval())
    assert not is_normalising(nn.InstanceNorm1d(4))
    assert norms_note(net(1), [8, 8], 2, bubble, False)[0].startswith("1 batch norm sees 8 samples")


def test_a_schedule_for_one_number_of_micro_batches() -> None:
    def only_two(micro_batches: int) -> float:
        if micro_batches != 2:
            raise ScheduleError("two")
        return 0.5

    assert norms_note(net(), [8, 8], 2, only_two, True)[0].endswith('micro_batches="auto" leaves them 16')


def test_the_plan_cuts_as_the_run_does() -> None:
    plan = lightning_pipe.plan(net(), ranks=2, batch=16)
    assert plan.batch is not None
    assert plan.batch.micro_batches == 1
    assert "2 batch norms see the whole batch of 16" in plan.notes[-1]
    plan = lightning_pipe.plan(net(), ranks=2, batch=16, micro_batches=4)
    assert plan.batch is not None
    assert plan.batch.micro_batches == 4
    assert "2 batch norms see 4 samples at a time" in plan.notes[-1]
    assert lightning_pipe.plan(net(kind=nn.LayerNorm), ranks=2, batch=16).batch.micro_batches == 8  # type: ignore[union-attr]
