"""What a module keeps of its calls is found, shown by value, and put into the same module elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.intercept.kept_state import KeptState, put


class Memory:
    def __init__(self) -> None:
        self.calls = 0


class Counts(nn.Module):
    """Keeps something of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.values, self.memory, self.constant = 0, list[float](), Memory(), [1, 2]
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("unchanged", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.values.append(float(x.sum()))
        self.memory.calls += 1
        self.mean.add_(x)
        return x


def changes(module: nn.Module) -> dict[Any, bytes | None]:
    before = KeptState(module)
    module(torch.ones(2))
    return dict(before.changes())


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_what_a_call_changes_is_put_into_another_copy_and_taken_back(inference: bool, stays: bool) -> None:
    one, other = nn.Sequential(Counts()), nn.Sequential(Counts())
    mean = other[0].mean
    with torch.inference_mode(inference):
        shown = changes(one)
        assert {name for _, name in shown} == {"calls", "values", "memory", "mean"}
        former = [put(other, place, value, stays=stays) for place, value in shown.items() if value is not None]
    counts: Any = other[0]
    assert (counts.mean is mean) == stays
    assert (counts.calls, counts.values, counts.memory.calls, counts.mean.tolist()) == (1, [2.0], 1, [1.0, 1.0])
    for undo in former:
        assert undo is not None
        undo()
    assert counts.mean is mean
    assert (counts.calls, counts.values, counts.memory.calls, counts.mean.tolist()) == (0, [], 0, [0.0, 0.0])


def test_what_is_large_or_does_not_pickle_is_found_and_not_shown() -> None:
    class Large(Counts):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(1 << 16, 2))
            self.memory.open = lambda: None  # type: ignore[attr-defined]

    shown = changes(Large())
    assert {name for (_, name), value in shown.items() if value is None} == {"mean", "memory"}
