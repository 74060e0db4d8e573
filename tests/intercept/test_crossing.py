"""One hop over a boundary: what leaves, what comes to a later stage, and what goes back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import CallRecord, LiveTensor, RunRecord
from lightning_pipe.intercept.crossing import Crossing
from lightning_pipe.tensor_spec import TensorSpec


def crossing(calls: int, tensors: dict[int, Tensor]) -> Crossing:
    """What leaves after some calls."""
    entries = tuple(LiveTensor(n, TensorSpec.of(each), each.requires_grad, False) for n, each in tensors.items())
    return Crossing(RunRecord(tuple(CallRecord(f"layer{n}", (n,), (False,)) for n in range(calls)), entries), tensors)


def test_a_skip_connection_joins_what_the_neighbour_sends() -> None:
    near, far = torch.ones(2), torch.zeros(2)
    found = crossing(3, {2: near}).joined(crossing(1, {0: far}))
    assert [entry.number for entry in found.path.entries] == [2, 0]
    assert len(found.path.calls) == 3
    assert found.tensors == {2: near, 0: far}


def test_stages_that_took_different_paths_are_refused() -> None:
    with pytest.raises(CutError, match="another path"):
        crossing(1, {}).joined(crossing(3, {}))


def test_a_stage_of_the_same_rank_gets_the_memory_without_the_graph() -> None:
    leaving = crossing(1, {0: torch.ones(2, requires_grad=True) * 2, 1: torch.ones(2)})
    arrived = leaving.detached()
    assert arrived.tensors[0].data_ptr() == leaving.tensors[0].data_ptr()
    assert not arrived.tensors[0].requires_grad
    assert leaving.differentiable == arrived.differentiable == (0,)


def test_what_has_not_travelled_needs_no_gradient() -> None:
    leaving = crossing(1, {0: torch.ones(2, requires_grad=True), 1: torch.ones(2, requires_grad=True)})
    assert Crossing(leaving.path, {1: leaving.tensors[1]}).differentiable == (1,)


def test_copies_have_the_strides_of_what_was_expanded() -> None:
    expanded = torch.ones(1, 3).expand(2, 3)
    copy = crossing(0, {0: expanded}).copied().tensors[0]
    assert copy.stride() == expanded.stride() == (0, 1)
    assert copy.data_ptr() != expanded.data_ptr()


def test_values_get_the_strides_that_they_had() -> None:
    transposed = torch.arange(6.0).reshape(2, 3).t()
    path = crossing(0, {0: transposed, 1: torch.ones(())}).path
    laid = Crossing(path, {0: transposed.contiguous()}).copied().tensors
    assert list(laid) == [0]
    assert laid[0].stride() == (1, 3)
    assert torch.equal(laid[0], transposed)
