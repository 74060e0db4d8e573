"""What graphs hold keeps its value when a tensor changes in place, and the tensor stays the object that it is."""

from __future__ import annotations

import weakref

import pytest
import torch

from lightning_pipe.intercept.held_by_graphs import let_go


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
