"""What a stage has received gets into its run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.arrival import Arrival
from lightning_pipe.intercept.call_record import LiveTensor, RunRecord
from lightning_pipe.intercept.crossing import Crossing
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.skipped_layers import SkippedLayers
from lightning_pipe.intercept.tracker import Tracker
from lightning_pipe.skip import StepStore
from lightning_pipe.tensor_spec import TensorSpec
from tests.intercept.test_skipped_layers import run_cache
from tests.intercept.test_tracker import tracker


def recorded(*, shared: bool = False) -> Crossing:
    """What a stage sends that has computed h and h * 2."""
    weight = nn.Parameter(torch.full((2,), 3.0))
    with (first := tracker()):
        h = weight * 1
        double = h * 2
    entries = tuple(LiveTensor(n, TensorSpec((2,), torch.float32), True, shared) for n in range(2))
    return Crossing(RunRecord(tuple(first.calls), entries), {0: h.detach(), 1: double.detach()})


def arrival(inbound: Crossing) -> tuple[Arrival, Tracker]:
    second = tracker(list(inbound.path.calls))
    skipped = SkippedLayers(second, StepStore(), run_cache())
    return Arrival(inbound, second, skipped), second


def test_placeholders_become_what_has_come() -> None:
    came, second = arrival(recorded())
    with second:
        h = nn.Parameter(torch.zeros(2)) * 1
        double = h * 2
        assert isinstance(double, Placeholder)
        came.fill()
        assert came.pending is None
        result = (h + double).sum()
    assert (h.tolist(), double.tolist(), type(h)) == ([3, 3], [6, 6], torch.Tensor)
    result.backward()
    assert came.incoming is not None
    assert [each.tolist() for each in came.incoming.gradients if each is not None] == [[1, 1], [1, 1]]
    assert came.is_older(h)
    assert not came.is_older(result)


def test_what_has_not_come_stays_a_placeholder() -> None:
    whole = recorded()
    came, second = arrival(Crossing(whole.path, {1: whole.tensors[1]}))
    with second:
        h = nn.Parameter(torch.zeros(2)) * 1
        double = h * 2
        came.fill()
    assert isinstance(h, Placeholder)
    assert double.tolist() == [6, 6]


def test_a_change_of_one_of_two_copies_raises() -> None:
    came, second = arrival(recorded(shared=True))
    with second:
        h = nn.Parameter(torch.zeros(2)) * 1
        kept = [h, h * 2]
        came.fill()
        came.check_copies()
        kept[0].add_(1)
    with pytest.raises(CutError, match=r"tensor 0, .* is changed in place after a cut"):
        came.check_copies()
