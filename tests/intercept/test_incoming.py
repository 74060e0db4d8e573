"""The entry of received tensors into autograd."""

from __future__ import annotations

import pytest
import torch

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.incoming import Incoming


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
