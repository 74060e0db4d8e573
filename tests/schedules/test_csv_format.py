"""Schedules as files: written, read, and refused with the cell that cannot be read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules import OneFOneB, read_csv
from tests.support.schedule_sweep import SWEEPS, Sweep


@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_what_was_written_is_read(sweep: Sweep, tmp_path: Path) -> None:
    for schedule in list(sweep)[::5]:
        if schedule.micro_batches < schedule.pipes:
            continue  # A pipe that nothing takes is not in the file.
        schedule.to_csv(tmp_path / "x.csv")
        # A file has orders only: no options, and versions of the weights as they are newest.
        again = replace(read_csv(tmp_path / "x.csv", name=sweep.name), versions=schedule.versions)
        assert again == replace(schedule, options={})


def test_the_file_is_one_row_per_rank(tmp_path: Path) -> None:
    OneFOneB().build(ranks=2, micro_batches=2).to_csv(tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_idle_cells_spaces_and_split_backwards_are_read(tmp_path: Path) -> None:
    path = tmp_path / "zero.csv"
    path.write_text("0F0,0F1,,0I0, 0I1,0W0,0W1\n,1F0,1I0,1F1,1I1,1W0,1W1\n\n", encoding="utf-8-sig")
    schedule = read_csv(path)
    assert (schedule.name, schedule.ranks, schedule.stages, schedule.micro_batches) == ("zero", 2, 2, 2)
    assert " ".join(map(str, schedule.actions[1])) == "1F0 1I0 1F1 1I1 1W0 1W1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", r"row 2, column 2: '1X0' is not an action"),
        ("0F0,0F1X\n", r"row 1, column 2: '0F1X' is not an action"),
        ("0F0,0SEND_X0\n", "kinds are B, F, I, R"),
        ("0F0\n1F0,1B0\n", "never runs B or I of micro-batch 0 at stage 0"),
        ("", "no actions"),
        ("(0F1;0B0)JOINT_F\n", r"'\(0F1;0B0\)JOINT_F' joins what is called OVERLAP_F_B"),
        ("(0F0)OVERLAP_F_B\n", r"'\(0F0\)OVERLAP_F_B' is not an action"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=message):
        read_csv(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"nothing\.csv cannot be read: No such file"):
        read_csv(tmp_path / "nothing.csv")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "image.csv"
    path.write_bytes(b"\xff\xd80F0")
    with pytest.raises(ScheduleError, match=r"image\.csv cannot be read: it is no text in UTF-8"):
        read_csv(path)
