"""What a step calls: recorded, counted, told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.partition.calls import Call, in_order, in_words, recorded, registered, work_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.second, self.first, self.act = nn.Linear(6, 4), nn.Linear(4, 6), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))


class Net(nn.Module):
    """Calls in another order than that of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.blocks, self.rnn = nn.Linear(4, 2), nn.ModuleList([Block(), Block()]), nn.GRU(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(self.rnn(x)[0])


def test_calls_are_nested_as_modules_call_each_other() -> None:
    net = Net()
    with recorded(net) as calls:
        net(torch.zeros(3, 5, 4))
    (whole,) = calls
    assert [call.name for call in whole.calls] == ["blocks.0", "blocks.1", "rnn", "out"]
    assert [call.name for call in whole.calls[0].calls] == ["blocks.0.first", "blocks.0.second"]
    assert not net._forward_hooks
    assert not net.out._forward_pre_hooks


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_work_is_counted_alike_in_every_mode(mode: Any) -> None:
    net = Net()
    with mode(), recorded(net) as calls:
        net(torch.zeros(3, 5, 4))
    block, rows = 2 * 15 * (4 * 6 + 6 * 4), 15
    assert work_of(calls, ["blocks.0", "blocks.1", "out"]) == [block, block, 2 * rows * 4 * 2]
    assert work_of(calls, ["rnn"]) == [2 * rows * sum(weight.numel() for weight in net.rnn.parameters())]


def test_an_error_leaves_no_hooks() -> None:
    net = Net()
    with pytest.raises(RuntimeError), recorded(net):
        net(torch.zeros(3, 5, 7))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


def test_compiled_modules_are_not_looked_into() -> None:
    net = Net()
    net.blocks[0].compile(backend="eager")
    with recorded(net) as calls:
        net(torch.zeros(3, 5, 4))
    assert [len(call.calls) for call in calls[0].calls[:2]] == [0, 2]


def test_registration_is_a_guess_of_the_order() -> None:
    calls = registered(Net())
    assert [call.name for call in calls] == ["out", "blocks.0", "blocks.1", "rnn"]
    assert [part.name for part in calls[1].calls] == ["blocks.0.second", "blocks.0.first"]
    assert [call.work for call in calls] == [10.0, 58.0, 58.0, 120.0]


def test_order_and_words() -> None:
    calls = [Call("stem"), Call("body", calls=[Call("x"), Call("y"), Call("y")]), Call("stem")]
    assert in_order(calls, ["x", "y"])
    assert not in_order(calls, ["y", "x"]), "out of order"
    assert not in_order(calls, ["x", "stem"]), "the first one again"
    assert not in_order(calls, ["x", "y", "z"]), "the last one is not called"
    assert in_words(calls) == "stem, body, stem"
    assert in_words([Call(str(number)) for number in range(20)]).endswith("…, 19")
