"""Gradients from the schedule to autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine.withheld_gradients import withheld_gradients

CPU = torch.device("cpu")
X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(8, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def scheduled(net: nn.Module, scale: float = 1.0) -> Tensor:
    """The loss of four micro-batches, their gradients held back."""
    total = 0.0
    with withheld_gradients(list(net.parameters()), scale) as held:
        for x, y in zip(X.chunk(4), Y.chunk(4), strict=True):
            loss = nn.functional.mse_loss(net(x), y) / 4
            (loss * scale).backward()
            total += loss.item()
    return held.loss(total, torch.float64, CPU)


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def halve_in_place(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)  # type: ignore[union-attr]


def nothing(parameter: nn.Parameter, count: Callable[..., Any]) -> None:
    pass


def tensor_hook(parameter: nn.Parameter, count: Callable[..., Any]) -> None:
    parameter.register_hook(lambda gradient: (count(), halve(gradient))[1])


def post_accumulate_hook(parameter: nn.Parameter, count: Callable[..., Any]) -> None:
    def hook(parameter: Tensor) -> None:
        count()
        halve_in_place(parameter)

    parameter.register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize("hook", [nothing, tensor_hook, post_accumulate_hook])
def test_equals_one_backward_pass_over_accumulated_batches(hook: Callable[..., None]) -> None:
    ours, plain = network(), network()
    calls = {"ours": 0, "plain": 0}
    for name, net in (("ours", ours), ("plain", plain)):
        hook(net[0].weight, lambda name=name: calls.update({name: calls[name] + 1}))
    for _ in range(2):
        (nn.functional.mse_loss(plain(X), Y) / 2).backward()
        loss = scheduled(ours)
        for parameter in ours.parameters():  # as Lightning does between training_step and backward
            parameter.grad = parameter.grad
        (loss / 2).backward()
    assert calls["ours"] == calls["plain"]
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_gradients_survive_being_zeroed_in_between() -> None:
    net = network()
    loss = scheduled(net)
    net.zero_grad()
    loss.backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


@pytest.mark.feature(
    "Optimizers and schedulers",
    "an optimizer in the backward pass (hooks of parameters)",
    "works",
    "once for each batch",
)
def test_optimizer_in_backward_steps_once() -> None:
    ours, plain = network(), network()
    for net in (ours, plain):
        optimizer = torch.optim.SGD([net[0].weight], lr=0.1)

        def step(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        net[0].weight.register_post_accumulate_grad_hook(step)
    nn.functional.mse_loss(plain(X), Y).backward()
    scheduled(ours).backward()
    torch.testing.assert_close(ours[0].weight, plain[0].weight)


def test_scale_of_the_losses_is_taken_out() -> None:
    ours, plain = network(), network()
    nn.functional.mse_loss(plain(X), Y).backward()
    loss = scheduled(ours, scale=1024.0)
    (loss * 1024.0).backward()  # as the scaler does
    torch.testing.assert_close(ours[0].weight.grad, plain[0].weight.grad * 1024.0)


def test_no_second_copy_of_the_gradients() -> None:
    parameter = nn.Parameter(torch.zeros(1000))
    with withheld_gradients([parameter]) as held:
        parameter.grad = torch.ones(1000)
    memory = held.gradients[0].data_ptr()
    (held.loss(1.0, torch.float32, CPU) / 3).backward()
    assert parameter.grad is not None
    assert parameter.grad.data_ptr() == memory
    torch.testing.assert_close(parameter.grad, torch.full((1000,), 1 / 3))


def test_rank_without_trainable_parameters() -> None:
    with withheld_gradients([nn.Parameter(torch.zeros(2), requires_grad=False)]) as held:
        pass
    (held.loss(1.5, torch.float32, CPU) / 4).backward()


def test_gradients_of_several_types() -> None:
    types = (torch.bfloat16, torch.float64, torch.complex64)
    parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in types]
    table = nn.Embedding(3, 2, sparse=True)
    with withheld_gradients([*parameters, table.weight]) as held:
        (sum((each * 8).abs().sum() for each in parameters) + table(torch.tensor([1])).sum() * 8).backward()
    (held.loss(1.0, torch.float32, CPU) / 4).backward()
    for parameter in parameters:
        assert torch.equal(parameter.grad, torch.full_like(parameter, 2))
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    assert table.weight.grad.to_dense().tolist() == [[0, 0], [2, 2], [0, 0]]


def test_parameters_without_gradient_keep_none() -> None:
    used, unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    with withheld_gradients([used, unused]) as held:
        (used * 2).sum().backward()
    held.loss(2.0, torch.float32, CPU).backward()
    assert used.grad is not None
    assert unused.grad is None


def test_parameters_that_are_trained_from_the_step_on() -> None:
    net = network()
    net[0].requires_grad_(False)
    with withheld_gradients(list(net.parameters())) as held:
        net.requires_grad_(True)
        loss = nn.functional.mse_loss(net(X), Y)
        loss.backward()
    assert all(each.grad is None for each in net.parameters())
    held.loss(loss.item(), torch.float64, CPU).backward()
    expected = network()
    nn.functional.mse_loss(expected(X), Y).backward()
    for ours, truth in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, truth.grad)


def test_old_gradients_and_hooks_come_back_after_an_error() -> None:
    net = network()
    scheduled(net).backward()
    before = copy.deepcopy(net[0].weight.grad)
    handle = net[0].weight.register_hook(halve)
    with pytest.raises(ValueError, match="stop"), withheld_gradients(list(net.parameters())):
        raise ValueError("stop")
    assert torch.equal(net[0].weight.grad, before)
    assert handle.id in net[0].weight._backward_hooks
