"""The tracker records what derives from parameters, and compares it with the record of the previous stage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import CallRecord
from lightning_pipe.intercept.tracker import Tracker


class Uses:
    """Notes which parameters are used."""

    def __init__(self) -> None:
        self.used: list[Tensor] = []

    def use(self, parameter: nn.Parameter, by: str = "") -> None:
        self.used.append(parameter)

    def run(self, module: str) -> None:
        pass

    def name_of(self, tensor: Tensor) -> str | None:
        return None


def tracker(
    expected: list[CallRecord] | None = None,
    uses: Uses | None = None,
    isolated: Callable[..., AbstractContextManager[None]] = lambda *_: nullcontext(),
) -> Tracker:
    made = Tracker(isolated, uses or Uses(), partial=True)
    if expected is not None:
        made.waiting, made.expected = True, tuple(expected)
    return made


def test_nothing_is_told_to_later_stages_too() -> None:
    weight = nn.Parameter(torch.ones(2, 2))

    def step() -> list[object]:
        h = weight * 2
        chosen = h[:0]
        return [torch._assert_async(h.sum() > 0), chosen.unbind(), chosen.tolist()]

    with (first := tracker()):
        assert step() == [None, (), []]
    with tracker(first.calls):
        assert step() == [None, (), []]


def test_another_call_raises() -> None:
    weight = nn.Parameter(torch.ones(2))
    with (first := tracker()):
        weight.relu()
    with tracker(first.calls), pytest.raises(CutError, match="to 'tanh', the previous stage made 'relu'"):
        weight.tanh()
    with tracker(first.calls) as second, pytest.raises(CutError, match="first layer after 0 calls"):
        second.arrive()


def test_another_history_of_the_batch_raises() -> None:
    x, weight = torch.ones(2), nn.Parameter(torch.ones(2))
    with (first := tracker()):
        first.digest.begin([x])
        x * 2 * weight
    with (second := tracker(first.calls)):
        second.digest.expected = first.digest.words
        second.digest.begin([x])
        x * 2 * weight
    with (third := tracker(first.calls)):
        third.digest.expected = first.digest.words
        third.digest.begin([x])
        other = x * 2 * 2
        with pytest.raises(CutError, match="is given other values here"):
            other * weight
