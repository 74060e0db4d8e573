"""The oracles agree with each other before anything is compared with them."""

from __future__ import annotations

import pytest
import torch

from lightning_pipe.partition import find_layers
from tests.support import oracle
from tests.support.model_zoo import MAIN, ZOO, Entry
from tests.support.pairs import slow_but

STEADY = [entry for entry in ZOO.values() if entry.name != "noise"]


@pytest.mark.parametrize("entry", ZOO.values(), ids=str)
def test_a_model_is_the_same_each_time(entry: Entry) -> None:
    one, two = entry.build(), entry.build()
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    assert len(find_layers(one, entry.layers)) >= 4
    assert {p.dtype for p in one.parameters()} == {torch.float64}


@pytest.mark.parametrize("entry", slow_but(STEADY, *MAIN), ids=str)
def test_lightning_and_the_plain_loop_agree(entry: Entry) -> None:
    plain = oracle.train(entry, micro_batches=3, accumulate=2, steps=2)
    trainer = oracle.train_with_lightning(entry, micro_batches=3, accumulate=2, steps=2)
    oracle.assert_equal(trainer, plain)


@pytest.mark.parametrize("name", ["mlp", "residual", "t5", "structures", "branches"])
def test_micro_batches_make_no_difference_where_the_loss_is_a_mean(name: str) -> None:
    whole = oracle.train_with_lightning(ZOO[name], micro_batches=1)
    cut = oracle.train_with_lightning(ZOO[name], micro_batches=3)
    oracle.assert_equal(cut, whole, tolerance=1e-6 if name == "t5" else 1e-9)  # T5's norm computes in float32


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


def test_split() -> None:
    batch = {"x": torch.arange(10), "pair": (torch.arange(20).view(10, 2),)}
    parts = oracle.split(batch, 4)
    assert [len(part["x"]) for part in parts] == [3, 3, 2, 2]
    assert torch.equal(torch.cat([part["pair"][0] for part in parts]), batch["pair"][0])
    assert oracle.shares(parts) == [0.3, 0.3, 0.2, 0.2]
    assert len(oracle.split(batch, 12)) == 10
