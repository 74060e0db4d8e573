"""What graphs hold keeps its value when a tensor changes in place, and the tensor stays the object that it is."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.held_by_graphs import let_go
from tests.support.engine_runs import assert_same, pipelined


def test_a_graph_keeps_the_value_and_all_others_see_the_change() -> None:
    x, table = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    view, alias, reference, place = table[:2], table.data, weakref.ref(table), table.data_ptr()
    del view, alias
    out = (x * table).sum()
    version = table._version
    let_go([table])
    assert table._version == version
    table.mul_(5)
    assert table._version > version
    out.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3
    assert (table.tolist(), table.data_ptr(), reference()) == ([10.0] * 3, place, table)


def test_a_view_that_changes_is_one_of_the_tensor_that_stays() -> None:
    x, table = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    out = (x * table).sum()
    row = table[:2]
    let_go([row, table])
    row.zero_()
    assert table.tolist() == [0.0, 0.0, 2.0]
    assert row._base is table
    out.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3


def test_what_a_graph_may_hold_in_another_way_stays() -> None:
    """The view is unknown, and the graph's: autograd says so."""
    x, table = torch.ones(1, 3, requires_grad=True), torch.full((3,), 2.0)
    out = (x * table[None]).sum()
    let_go([table])
    table.mul_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_what_nobody_holds_stays_in_its_place() -> None:
    table = torch.ones(3)
    place = table.data_ptr()
    let_go([table])
    assert table.data_ptr() == place
    with torch.inference_mode():
        let_go([torch.ones(3)])


class Scaled(nn.Module):
    """The step changes what its layers multiply by, while graphs of other micro-batches hold it."""

    def __init__(self, broadcasts: bool = False) -> None:
        super().__init__()
        self.layers, self.broadcasts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4)), broadcasts
        for layer in self.layers:
            layer.register_buffer("tau", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            tau: Any = layer.tau
            tau.mul_(0.9)
            x = torch.tanh(layer(x)) * (tau[None] if self.broadcasts else tau)
        return x.square().mean()


def test_graphs_of_other_micro_batches_keep_what_the_step_changes() -> None:
    """Where all layers are on one stage; elsewhere the step may not change them."""
    batches = [{"x": torch.randn(4, 3, dtype=torch.float64)} for _ in range(3)]
    assert_same(Scaled().double(), batches, 4, ranks=1, stages=1, schedule="gpipe", layers="layers")
    with pytest.raises(CutError, match=r"a tensor \[torch\.DoubleTensor \[.*3\]\] that has changed in place since"):
        pipelined(Scaled(broadcasts=True).double(), batches, 4, ranks=1, stages=1, schedule="gpipe", layers="layers")
