"""What is compared with the oracles can be told apart: training changes it, and a difference is told."""

from __future__ import annotations

import pytest
import torch

from tests.support import oracle
from tests.support.model_zoo import ZOO

STEADY = [entry for entry in ZOO.values() if entry.name != "noise"]


def test_training_changes_what_is_compared() -> None:
    for entry in STEADY:
        trained, fresh = oracle.train(entry, steps=1), oracle.Trace(weights=oracle.state_of(entry.build()))
        changed = oracle.differences(trained, fresh, tolerance=1e-6)
        assert changed, f"{entry} does not learn"


def test_differences_are_told_in_words() -> None:
    one = oracle.Trace(losses=[1.0, 2.0], weights={"w": torch.zeros(2), "v": torch.zeros(1)})
    two = oracle.Trace(losses=[1.0, 2.5], weights={"w": torch.tensor([0.0, 1e-3])})
    assert oracle.differences(one, two) == [
        "loss 1: 2.0 instead of 2.5 (differs by 5.00e-01)",
        "w: 0.0 instead of 0.0010000000474974513 (differs by 1.00e-03)",
        "v: only found",
    ]
    assert not oracle.close(float("nan"), 0.0)
    assert not oracle.close(torch.zeros(2), torch.zeros(1))
    with pytest.raises(AssertionError, match="loss 1"):
        oracle.assert_equal(one, two)
