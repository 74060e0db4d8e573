"""What the verdicts on published modules rest on. The modules train in an environment of their own."""

from __future__ import annotations

import re

import torch

from tests.field import runs, table, verdicts
from tests.field.modules import FOLDER, MODULES, PACKAGES


def test_runs_differ_by_losses_by_weights_and_by_what_is_missing() -> None:
    one = {"losses": [1.0, 2.0], "weights": {"w": torch.ones(3)}}
    assert verdicts.distances(one, one) == (0.0, 0.0)
    assert verdicts.distances({**one, "losses": [1.0, 2.3]}, one)[0] > 0.09
    assert verdicts.distances({**one, "losses": [1.0]}, one)[0] == float("inf")
    assert verdicts.distances({**one, "losses": [1.0, float("nan")]}, one)[0] == float("inf")
    assert verdicts.distances({**one, "weights": {}}, one)[1] == float("inf")
    assert verdicts.distances({**one, "weights": {"w": torch.zeros(3)}}, one)[1] == 0.5


def test_every_module_of_the_list_has_its_function() -> None:
    for one in MODULES.values():
        source = (FOLDER / "cases" / f"{one.file}.py").read_text()
        assert re.search(rf"^def {one.name}\(\) -> Case:", source, re.MULTILINE), one.name
        assert one.package in PACKAGES
        assert one.form in ("own", "wrapped")


def test_the_share_counts_what_trains_on_one_device_with_one_optimizer() -> None:
    found = [
        runs.Finding("bert", verdicts.EQUAL, verdicts.EQUAL),
        runs.Finding("t5", verdicts.REMEDIED, verdicts.REFUSED, {"layers": ["a"]}),
        runs.Finding("gpt2"),
        runs.Finding("clip", verdicts.REFUSED, verdicts.REFUSED, one_optimizer=False),
    ]
    page = table.markdown(found)
    assert "1 of 2 modules (50 %)" in page
    assert "`layers=['a']`" in page
