"""The two ends of a cut: entries of what leaves, and how what arrives gets into autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import LiveTensor, RunRecord
from lightning_pipe.intercept.incoming import Incoming
from lightning_pipe.intercept.outgoing import check_plain, entry_of, overlapping
from lightning_pipe.tensor_spec import TensorSpec


def test_only_memory_that_overlaps_is_shared() -> None:
    x = torch.zeros(6)
    left, right, middle, other = x[:3], x[3:], x[2:4], torch.zeros(6)
    assert overlapping([left, right, other]) == set()
    assert overlapping([left, middle, other]) == {id(left), id(middle)}


def test_entries_say_what_travels() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert entry_of(4, x.t(), False, None) == LiveTensor(4, TensorSpec((3, 2), torch.float32, (1, 3)), True, False)
    assert entry_of(4, x * 1, False, (0, 1)).shared
    windows = torch.ones(6).unfold(0, 3, 1)
    assert entry_of(4, windows, False, None).shared


@pytest.mark.parametrize("tensor", [torch.ones(2).to_sparse(), nn.Parameter(torch.ones(2))], ids=["sparse", "type"])
def test_other_kinds_of_tensors_do_not_travel(tensor: Tensor) -> None:
    with pytest.raises(CutError, match="crosses the cut before layer 'next'"):
        check_plain(tensor, "next")


def test_gradients_gather_at_the_entry() -> None:
    incoming = Incoming([torch.ones(2), torch.ones(2), torch.ones(2)], [True, False, True], skips=False)
    first, second, third = incoming.tensors
    assert [each.requires_grad for each in (first, second, third)] == [True, False, True]
    first.mul_(3)  # as on one device: it is no leaf
    (first * second).sum().backward()
    assert [None if each is None else each.tolist() for each in incoming.gradients] == [[3, 3], None]
    incoming.add([torch.ones(2), torch.ones(2)])
    assert [each.tolist() for each in incoming.gradients if each is not None] == [[4, 4], [1, 1]]


def test_a_hook_on_one_of_several_tensors_raises() -> None:
    incoming = Incoming([torch.ones(2), torch.ones(2)], [True, True], skips=False)
    first, second = incoming.tensors
    first.register_hook(lambda gradient: gradient)
    (first * second).sum().backward()
    with pytest.raises(CutError, match="the hook gets a part of the gradient"):
        incoming.check_hooks()


def test_values_get_the_strides_that_they_had() -> None:
    spec = TensorSpec((3, 2), torch.float32, (1, 3))
    record = RunRecord((), (LiveTensor(0, spec, False, False), LiveTensor(1, spec._replace(shape=()), False, False)))
    value = torch.arange(6.0).reshape(3, 2)
    laid = record.laid_out({0: value})
    assert laid[0].stride() == (1, 3)
    assert torch.equal(laid[0], value)
    assert record.single_numbers == {1}
