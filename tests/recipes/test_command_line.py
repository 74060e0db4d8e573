"""What the processes of a job read, and what a job leaves behind."""

from __future__ import annotations

import os

import pytest
import torch

from recipes import command_line


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in command_line.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_the_first_process_reads_its_own_command_line() -> None:
    assert command_line.arguments(["-m", "trainer.devices=2,3"]) == ["-m", "trainer.devices=2,3"]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("+experiment=e", "experiment=e"),
        ("+trainer.profiler=simple", "++trainer.profiler=simple"),
        ("+seed=3", "++seed=3"),
        ("++seed=3", "++seed=3"),
        ("~scheduler", "~scheduler"),
        ("+callbacks@more=averaged", "+callbacks@more=averaged"),
    ],
)
def test_a_plus_before_what_is_there_is_accepted(given: str, read: str) -> None:
    assert command_line.arguments([given]) == [read]


def test_the_others_write_nothing_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    given = command_line.arguments(["trainer.devices=3", "hydra.run.dir='out'"])
    assert given[:2] == ["trainer.devices=3", "hydra.run.dir='out'"]
    assert "hydra.output_subdir=null" in given
    assert "hydra.run.dir=." not in given


def test_under_another_launcher_only_rank_zero_has_an_output_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")  # first process of the second machine
    given = command_line.arguments(["experiment=e"])
    assert given[0] == "experiment=e"
    assert "hydra.run.dir=." in given


def test_the_number_of_threads_is_that_of_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    try:
        with command_line.threads(1):
            assert (os.environ["OMP_NUM_THREADS"], torch.get_num_threads()) == ("1", 1)
    finally:
        torch.set_num_threads(before)
    assert os.environ["OMP_NUM_THREADS"] == "2"
