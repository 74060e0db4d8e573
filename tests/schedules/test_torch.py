"""Against torch.distributed.pipelining: its orders are ours, its files can be read here and ours there."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pipe.schedules import (
    DualPipeV,
    Interleaved,
    InterleavedZeroBubble,
    LoopedBFS,
    Schedule,
    ZeroBubble,
    read_csv,
)
from lightning_pipe.schedules.csv_format import parse_row

theirs = pytest.importorskip("torch.distributed.pipelining.schedules")


def rows(schedule: str, ranks: int, micro_batches: int) -> list[list[str]]:
    """The compute-only order of one of torch's classes, with two stages on each rank, as the cells of its dump."""
    rounds = max(1, micro_batches // ranks)
    made = SimpleNamespace(
        pp_group_size=ranks,
        num_stages=2 * ranks,
        n_local_stages=2,
        _stages=[None, None],
        _n_microbatches=micro_batches,
        number_of_rounds=rounds,
        microbatches_per_round=micro_batches // rounds,
    )
    order = getattr(theirs, f"Schedule{schedule}")._calculate_single_rank_operations
    orders = [order(made, rank) for rank in range(ranks)]
    return [["" if action is None else str(action) for action in order] for order in orders]


@pytest.mark.parametrize(
    ("make", "name", "first", "step"),
    [
        (Interleaved(2), "Interleaved1F1B", lambda ranks: ranks, lambda ranks: ranks),
        (InterleavedZeroBubble(2), "InterleavedZeroBubble", lambda ranks: ranks, lambda ranks: ranks),
        (LoopedBFS(2), "LoopedBFS", lambda ranks: 1, lambda ranks: 1),
        (ZeroBubble("v"), "ZBVZeroBubble", lambda ranks: ranks, lambda ranks: 1),
        (DualPipeV(), "DualPipeV", lambda ranks: 2 * ranks, lambda ranks: 1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore:.*has no order of its own")
def test_the_same_order(make: Any, name: str, first: Callable[[int], int], step: Callable[[int], int]) -> None:
    for ranks in (2, 3, 4, 5):
        for micro_batches in range(first(ranks), 5 * ranks, step(ranks)):
            order = [parse_row(cells) for cells in rows(name, ranks, micro_batches)]
            assert make.build(ranks, micro_batches).actions == tuple(map(tuple, order)), (ranks, micro_batches)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("ZBVZeroBubble", (1, 6)),
        ("DualPipeV", (1, 6)),
        ("LoopedBFS", (1, 5)),
        ("Interleaved1F1B", (1, 5)),
        ("InterleavedZeroBubble", (1, 5)),
    ],
)
def test_a_file_dumped_by_torch_runs_here(name: str, stages: tuple[int, int], tmp_path: Path) -> None:
    with open(tmp_path / "dumped.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows(name, 4, 8))
    schedule = read_csv(tmp_path / "dumped.csv")
    assert (schedule.ranks, schedule.stages, schedule.micro_batches) == (4, 8, 8)
    assert schedule.stages_of(1) == stages

    computed = {
        rank: [theirs._Action.from_str(cell) for cell in row if cell] for rank, row in enumerate(rows(name, 4, 8))
    }
    ranks = {stage: schedule.placement[0, stage] for stage in range(8)}
    whole = theirs._add_send_recv(
        {rank: theirs._add_unshard_reshard(actions) for rank, actions in computed.items()}, ranks.__getitem__, 8
    )
    with open(tmp_path / "dumped.csv", "w", newline="") as file:
        csv.writer(file).writerows([*map(str, actions), f"{rank}REDUCE_GRAD"] for rank, actions in whole.items())
    assert {"0UNSHARD", "0RESHARD", "0SEND_F0", "0RECV_B0"} <= set(map(str, whole[0]))
    assert read_csv(tmp_path / "dumped.csv") == schedule


@pytest.mark.parametrize(
    "schedule",
    [Interleaved(3).build(4, 8), LoopedBFS(3).build(4, 5), ZeroBubble("h2").build(4, 8), DualPipeV().build(3, 6)],
)
def test_a_file_written_here_is_valid_there(schedule: Schedule, tmp_path: Path) -> None:
    schedule.to_csv(tmp_path / "x.csv")
    with open(tmp_path / "x.csv", newline="") as file:
        actions = {rank: [theirs._Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(file))}
    ranks = theirs._validate_schedule(actions, schedule.ranks, schedule.stages, schedule.micro_batches)
    assert ranks == {stage: schedule.placement[0, stage] for stage in range(schedule.stages)}
    with io.StringIO() as text:
        csv.writer(text).writerows(actions.values())
        assert text.getvalue() == (tmp_path / "x.csv").read_bytes().decode()
