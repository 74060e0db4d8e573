"""What the verdicts on published modules rest on. The modules train in an environment of their own."""

from __future__ import annotations

import re

import torch

from tests.field import runs, table, verdicts
from tests.field.modules import FOLDER, MODULES, PACKAGES

HINT = """PipeStrategy(layers=["net.a", "net.b"]), or micro_batches=1. Or loss_weight='sum'; balance=counts."""


def test_options_are_those_with_a_value_to_paste() -> None:
    assert list(verdicts.options(HINT)) == [
        ("layers", ["net.a", "net.b"]),
        ("micro_batches", 1),
        ("loss_weight", "sum"),
    ]


def test_runs_differ_by_losses_by_weights_and_by_what_is_missing() -> None:
    one = {"losses": [1.0, 2.0], "weights": {"w": torch.ones(3)}}
    assert verdicts.distances(one, one) == (0.0, 0.0)
    assert verdicts.distances({**one, "losses": [1.0, 2.3]}, one)[0] > 0.09
    assert verdicts.distances({**one, "losses": [1.0]}, one)[0] == float("inf")
    assert verdicts.distances({**one, "losses": [1.0, float("nan")]}, one)[0] == float("inf")
    assert verdicts.distances({**one, "weights": {}}, one)[1] == float("inf")
    assert verdicts.distances({**one, "weights": {"w": torch.zeros(3)}}, one)[1] == 0.5


def test_the_plan_says_what_batch_norm_sees() -> None:
    plan = "Batch  16 samples per optimizer step = 16 (batch) x 1; batch = 8\nmicro-batches x 2"
    assert verdicts.cut_into(plan) == 8
    assert not verdicts.says_so(plan)
    assert verdicts.says_so(f"{plan}\nNote  20 batch\nnorms see 2 samples")


def test_an_error_of_ours_is_a_refusal_until_its_remedy_has_failed() -> None:
    ours = {"ours": True, "by_us": True}
    assert verdicts.failure(ours, tried=False) == verdicts.REFUSED
    assert verdicts.failure(ours, tried=True) == verdicts.UNCLEAR
    assert verdicts.failure({"ours": False, "by_us": True}, tried=False) == verdicts.CRASHED
    assert verdicts.failure({"ours": False, "by_us": False}, tried=False) == verdicts.UNCLEAR


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
