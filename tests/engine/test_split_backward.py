"""Both halves of a backward pass together give the gradients of the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine.split_backward import input_half


def chain(weights: nn.ModuleList, x: Tensor) -> Tensor:
    return weights[1](torch.tanh(weights[0](x)))


def shared(weights: nn.ModuleList, x: Tensor) -> Tensor:
    return weights[0](torch.tanh(weights[0](x)))


def broadcast(weights: nn.ModuleList, x: Tensor) -> Tensor:
    return x * weights[0].bias + (x * weights[1].bias).sum()


@pytest.mark.parametrize("run", [chain, shared, broadcast])
@pytest.mark.parametrize("hooked", ["", "register_hook", "register_prehook"])
def test_halves_equal_the_whole(run: Callable[[nn.ModuleList, Tensor], Tensor], hooked: str) -> None:
    torch.manual_seed(0)
    weights = nn.ModuleList(nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))
    entry = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(4, 3, dtype=torch.float64)
    run(weights, entry).backward(gradient)
    expected = [None if p.grad is None else p.grad.clone() for p in (entry, *weights.parameters())]
    entry.grad = None
    weights.zero_grad()
    calls: list[int] = []
    result = run(weights, entry)
    if hooked:
        getattr(result.grad_fn, hooked)(lambda *_: calls.append(1))
    weight_half = input_half([result], [gradient], entry, whole=False)
    torch.testing.assert_close(entry.grad, expected[0])
    if not (hooked or run is shared):  # with a hook where both halves meet, or a weight twice, the pass stays whole
        assert all(p.grad is None for p in weights.parameters())
    weight_half()
    for parameter, truth in zip(weights.parameters(), expected[1:], strict=True):
        assert (parameter.grad is None) == (truth is None)
        if truth is not None:
            torch.testing.assert_close(parameter.grad, truth)
    assert len(calls) == bool(hooked)
