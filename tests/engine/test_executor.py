"""What two earlier stages send to one, and what stays on the rank."""

from __future__ import annotations

import pytest
import torch

from lightning_pipe.engine.executor import hand_over, joined
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import CallRecord, Crossing, LiveTensor, RunRecord
from lightning_pipe.tensor_spec import TensorSpec


def path(calls: int, *numbers: int) -> RunRecord:
    entries = tuple(LiveTensor(n, TensorSpec((2,), torch.float32), False, False) for n in numbers)
    return RunRecord(tuple(CallRecord(f"layer{n}", (n,), (False,)) for n in range(calls)), entries)


def test_a_skip_connection_joins_what_the_neighbour_sends() -> None:
    near, far = torch.ones(2), torch.zeros(2)
    found, values = joined((path(3, 2), {2: near}), (path(1, 0), {0: far}))
    assert [entry.number for entry in found.entries] == [2, 0]
    assert len(found.calls) == 3
    assert values == {2: near, 0: far}


def test_stages_that_took_different_paths_are_refused() -> None:
    with pytest.raises(CutError, match="another path"):
        joined((path(1), {}), (path(3), {}))


def test_a_stage_of_the_same_rank_gets_the_memory_without_the_graph() -> None:
    tensor = torch.ones(2, requires_grad=True) * 2
    _, values = hand_over(Crossing(path(1, 0), (tensor,)))
    assert values[0].data_ptr() == tensor.data_ptr()
    assert not values[0].requires_grad
