"""Buffers are found by what shares their memory, also behind a change of theirs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.buffer_changes import BufferChanges
from lightning_pipe.intercept.state_reads import StateReads


class Rank:
    """A rank with a layer, and a run of the step in which an earlier stage may have run it."""

    def __init__(self, *, apart: bool = True, waiting: bool = False, answered: bool = False) -> None:
        self.layer = nn.Linear(1, 1)
        self.layer.register_buffer("tau", torch.ones(3))
        self.told: list[str] = []
        self.changes = BufferChanges(lambda: [self.layer], StateReads([("layer", self.layer)], Any), self.note)
        skipped = SimpleNamespace(modules=[self.layer] if answered else [])
        self.run: Any = SimpleNamespace(tracker=SimpleNamespace(waiting=waiting), skipped_layers=skipped, apart=apart)

    def note(self, part: nn.Module, name: str) -> None:
        assert part is self.layer
        self.told.append(name)

    def change(self, *written: Tensor) -> list[str]:
        self.told.clear()
        self.changes.check(self.run, written, "mul_")
        return self.told


def test_buffers_are_told_and_other_tensors_are_not() -> None:
    rank = Rank()
    former = rank.layer.tau
    assert rank.change(former) == rank.change(former[0], former) == ["tau"]
    assert rank.change(torch.ones(3)) == []
    rank.layer.tau = torch.ones(3)
    assert rank.change(former) == []
    assert rank.change(rank.layer.tau) == ["tau"]


def test_where_stages_have_a_rank_each_nobody_is_told() -> None:
    rank = Rank(apart=False)
    assert rank.change(rank.layer.tau) == []


def test_what_cannot_be_put_back_is_refused() -> None:
    rank = Rank()
    with pytest.raises(CutError, match=r"the buffer `self\.layer\.tau` by way of a tensor"):
        rank.change(rank.layer.tau.data)


@pytest.mark.parametrize("apart", [True, False])
def test_behind_the_stage_of_its_layer_a_change_is_refused(apart: bool) -> None:
    rank = Rank(apart=apart, answered=True)
    with pytest.raises(CutError, match=r"the buffer `self\.layer\.tau` in place behind the layers"):
        rank.change(rank.layer.tau)
    waits = Rank(apart=apart, answered=True, waiting=True)
    assert waits.change(waits.layer.tau) == ["tau"] * apart
