"""Against torch.distributed.pipelining: its orders are ours, its files can be read here and ours there."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pipe.schedules import DualPipeV, Interleaved, Schedule, ZeroBubble, read_csv
from lightning_pipe.schedules.csv_format import parse_row

theirs = pytest.importorskip("torch.distributed.pipelining.schedules")


def rows(schedule_class: Any, ranks: int, micro_batches: int, **attributes: object) -> list[list[str]]:
    """The compute-only order of one of torch's classes as the cells that it would dump."""
    made = SimpleNamespace(pp_group_size=ranks, num_stages=2 * ranks, _n_microbatches=micro_batches, **attributes)
    orders = [schedule_class._calculate_single_rank_operations(made, rank) for rank in range(ranks)]
    return [["" if action is None else str(action) for action in order] for order in orders]


def interleaved_rows(ranks: int, micro_batches: int) -> list[list[str]]:
    return rows(
        theirs.ScheduleInterleaved1F1B,
        ranks,
        micro_batches,
        n_local_stages=2,
        number_of_rounds=max(1, micro_batches // ranks),
        microbatches_per_round=micro_batches // max(1, micro_batches // ranks),
    )


@pytest.mark.parametrize(
    ("make", "reference", "multiples", "least"),
    [
        (Interleaved(2), interleaved_rows, True, 1),
        (ZeroBubble("v"), lambda ranks, m: rows(theirs.ScheduleZBVZeroBubble, ranks, m), False, 1),
        (DualPipeV(), lambda ranks, m: rows(theirs.ScheduleDualPipeV, ranks, m), False, 2),
    ],
    ids=["interleaved", "zero bubble V", "DualPipeV"],
)
@pytest.mark.filterwarnings("ignore:.*has no order of its own")
def test_the_same_order(
    make: Any, reference: Callable[[int, int], list[list[str]]], multiples: bool, least: int
) -> None:
    for ranks in (2, 3, 4, 5):
        for micro_batches in range(ranks * least, 5 * ranks, ranks if multiples else 1):
            order = [parse_row(cells) for cells in reference(ranks, micro_batches)]
            assert make.build(ranks, micro_batches).actions == tuple(map(tuple, order)), (ranks, micro_batches)


@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_a_file_dumped_by_torch_runs_here(name: str, tmp_path: Path) -> None:
    with open(tmp_path / "dumped.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows(getattr(theirs, name), 4, 9))
    schedule = read_csv(tmp_path / "dumped.csv")
    assert (schedule.ranks, schedule.stages, schedule.micro_batches) == (4, 8, 9)
    assert schedule.stages_of(1) == (1, 6)


@pytest.mark.parametrize(
    "schedule", [Interleaved(3).build(4, 8), ZeroBubble("h2").build(4, 8), DualPipeV().build(3, 6)]
)
def test_a_file_written_here_is_valid_there(schedule: Schedule, tmp_path: Path) -> None:
    schedule.to_csv(tmp_path / "x.csv")
    with open(tmp_path / "x.csv", newline="") as file:
        actions = {rank: [theirs._Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(file))}
    ranks = theirs._validate_schedule(actions, schedule.ranks, schedule.stages, schedule.micro_batches)
    assert ranks == {stage: schedule.rank_of(0, stage) for stage in range(schedule.stages)}
    with io.StringIO() as text:
        csv.writer(text).writerows(actions.values())
        assert text.getvalue() == (tmp_path / "x.csv").read_bytes().decode()
