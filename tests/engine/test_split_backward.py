"""Both halves of a backward pass together give the gradients of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


class Limited(torch.autograd.Function):
    """Limits gradients: those of two parts, added, are not that of their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(-0.1, 0.1)


def table(weight: Tensor, x: Tensor) -> list[Tensor]:
    limited = Limited.apply(weight)  # type: ignore[no-untyped-call]
    return [x * limited, limited.sin()]


def two_tables(weight: Tensor, x: Tensor) -> list[Tensor]:
    limited = Limited.apply(weight)  # type: ignore[no-untyped-call]
    return [x * 2, limited.sin(), limited.cos()]


@pytest.mark.parametrize("run", [table, two_tables])
def test_a_tensor_made_from_weights_gets_its_whole_gradient_at_once(
    run: Callable[[Tensor, Tensor], list[Tensor]],
) -> None:
    weight, entry = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    results = run(weight, entry)
    torch.autograd.backward(results, [torch.ones_like(each) for each in results])
    expected, weight.grad = weight.grad, None
    results = run(weight, entry)
    input_half(results, [torch.ones_like(each) for each in results], entry, whole=False)()
    torch.testing.assert_close(weight.grad, expected)


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
