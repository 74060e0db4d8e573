"""The entry of received tensors into autograd, and into the run of a stage."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import LiveTensor, RunRecord
from lightning_pipe.intercept.crossing import Crossing
from lightning_pipe.intercept.incoming import Incoming
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.stage_layers import StageLayers
from lightning_pipe.intercept.stage_run import StageRun
from lightning_pipe.tensor_spec import TensorSpec
from tests.intercept.test_skipped_layers import run_cache
from tests.intercept.test_tracker import tracker


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


def recorded(*, shared: bool = False) -> Crossing:
    """What a stage sends that has computed h and h * 2."""
    weight = nn.Parameter(torch.full((2,), 3.0))
    with (first := tracker()):
        h = weight * 1
        double = h * 2
    entries = tuple(LiveTensor(n, TensorSpec((2,), torch.float32), True, shared) for n in range(2))
    return Crossing(RunRecord(tuple(first.calls), entries), {0: h.detach(), 1: double.detach()})


def arriving(inbound: Crossing) -> StageRun:
    """A run of the second of two stages."""
    stage = StageLayers(1, range(1, 2), ["0", "1"], {})
    return StageRun(stage, inbound, lambda *_: nullcontext(), run_cache())


def test_placeholders_become_what_has_come() -> None:
    run = arriving(recorded())
    with run.tracker:
        h = nn.Parameter(torch.zeros(2)) * 1
        double = h * 2
        assert isinstance(double, Placeholder)
        run.arrive()
        assert run.pending is None
        result = (h + double).sum()
    assert (h.tolist(), double.tolist(), type(h)) == ([3, 3], [6, 6], torch.Tensor)
    result.backward()
    assert run.incoming is not None
    assert [each.tolist() for each in run.incoming.gradients if each is not None] == [[1, 1], [1, 1]]
    assert run.is_older(h)
    assert not run.is_older(result)


def test_what_has_not_come_stays_a_placeholder() -> None:
    whole = recorded()
    run = arriving(Crossing(whole.path, {1: whole.tensors[1]}))
    with run.tracker:
        h = nn.Parameter(torch.zeros(2)) * 1
        double = h * 2
        run.arrive()
    assert isinstance(h, Placeholder)
    assert double.tolist() == [6, 6]


def test_a_change_of_one_of_two_copies_raises() -> None:
    run = arriving(recorded(shared=True))
    with run.tracker:
        h = nn.Parameter(torch.zeros(2)) * 1
        kept = [h, h * 2]
        run.arrive()
        run.check_copies()
        kept[0].add_(1)
    with pytest.raises(CutError, match=r"tensor 0, .* is changed in place after a cut"):
        run.check_copies()
