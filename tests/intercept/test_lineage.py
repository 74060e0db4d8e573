"""The numbers that tell whether two stages have made the same of the batch."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor

from lightning_pipe.intercept.lineage import Lineage


def begun() -> tuple[Lineage, Tensor]:
    batch, lineage = torch.ones(2), Lineage()
    lineage.begin([batch, "text"])
    return lineage, batch


def given_after(*names: str) -> int:
    """What a call is given of a batch on which functions of these names were called."""
    lineage, tensor = begun()
    for name in names:
        made = torch.ones(2)
        lineage.follow(name, lineage.numbers([tensor]), [made])
        tensor = made
    return lineage.given([tensor])


def test_the_same_functions_give_the_same_number() -> None:
    assert given_after("mul", "add") == given_after("mul", "add") != 0
    assert len({given_after("mul", "add"), given_after("add", "mul"), given_after("mul"), given_after()}) == 4


def test_changes_in_place_give_the_batch_another_number() -> None:
    lineage, batch = begun()
    before = lineage.given([batch])
    lineage.follow("add_", lineage.numbers([batch]), [batch])
    assert lineage.given([batch]) != before


def test_draws_count_in_all_later_calls() -> None:
    lineage, batch = begun()
    before, nothing = lineage.given([batch]), lineage.given([])
    lineage.draw("rand")
    assert lineage.given([batch]) != before
    assert lineage.given([]) != nothing == 0


def test_what_an_earlier_run_has_made_has_no_number() -> None:
    lineage, batch = begun()
    kept = torch.ones(2)
    lineage.follow("mul", lineage.numbers([batch]), [kept])
    assert lineage.numbers([kept])
    assert begun()[0].numbers([kept]) == []


def test_processes_that_hash_text_differently_agree() -> None:
    code = "from tests.intercept.test_lineage import given_after; print(given_after('mul', 'add'))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=True,
        timeout=100,
        text=True,
    )
    assert int(found.stdout) == given_after("mul", "add")
