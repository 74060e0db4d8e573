"""How numbers of micro-batches join is learnt over batches."""

from __future__ import annotations

import warnings

import pytest

from lightning_pipe.trainer.data.joining import Comparison
from lightning_pipe.trainer.data.number_rules import NumberRules


def test_numbers_that_fit_several_rules_wait_for_a_batch_that_tells() -> None:
    rules = NumberRules()
    rules.learn([{"n": Comparison("mean", [(2.0, 2.0, 2.0, 0.5)])}])
    assert rules.rules == {"n": "mean"}
    rules.learn([{"n": Comparison("mean", [(1.0, 3.0, 3.0, 0.5)])}])
    assert rules.rules == {"n": "max"}


def test_a_number_without_a_rule_is_told_once() -> None:
    rules = NumberRules()
    with pytest.warns(UserWarning, match="n is 1 and 2 for two micro-batches and 7 for both"):
        rules.learn([{"n": Comparison("mean", [(1.0, 2.0, 7.0, 0.5)])}])
    assert rules.rules == {"n": None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rules.learn([{"n": Comparison("mean", [(1.0, 2.0, 7.0, 0.5)])}])


def test_only_the_last_run_counts() -> None:
    rules = NumberRules()
    rules.note([("a", 1.0, "mean"), ("b", 2.0, "sum")])
    rules.note([("a", 3.0, "mean")])
    assert rules.values() == {"a": 3.0}
    assert rules.compared(None) == {}
