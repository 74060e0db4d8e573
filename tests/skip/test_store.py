"""Layers that stash and pop by the plain functions, over stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe import skip
from lightning_pipe.skip import SkipError
from tests.support.engine_runs import assert_same, pipelined
from tests.support.pairs import pairs, slow_but

pytestmark = pytest.mark.usefixtures("float64")
WIDTH = 250
"""A tensor of four rows is larger than what describes it."""


class Plainly(nn.Module):
    """Stashes and pops by the plain functions, as told."""

    def __init__(self, *todo: tuple[str, str]) -> None:
        super().__init__()
        self.linear, self.todo = nn.Linear(WIDTH, WIDTH), todo

    def forward(self, x: Tensor) -> Tensor:
        for what, name in self.todo:
            if what == "take":
                kept = skip.take(name)
                assert kept is not None
                x = x + 0.5 * kept
            else:
                skip.put(name, x.narrow(1, 0, 1) if what == "put narrow" else x)
        return torch.tanh(self.linear(x))


class Told(nn.Module):
    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Plainly(*todo) for todo in layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


PUT, TAKE = ("put", "a"), ("take", "a")
REUSES = {
    "again under the same name": [[PUT], [TAKE, PUT], [], [TAKE]],
    "put back and taken at once": [[PUT], [], [TAKE, PUT, TAKE], []],
    "two at once": [[PUT, ("put", "b")], [TAKE], [("put", "a")], [("take", "b"), TAKE]],
}


@pytest.mark.parametrize(
    ("reuse", "schedule"),
    pairs(list(REUSES), ["gpipe", "interleaved", "chimera"], lambda reuse, schedule: reuse == schedule),
)
def test_plain_functions_may_use_a_name_again(reuse: str, schedule: str) -> None:
    torch.manual_seed(0)
    layers: Any = REUSES[reuse]
    ranks = 2 if schedule == "interleaved" else 4
    data = [{"x": 0.1 * torch.randn(size, WIDTH)} for size in (4, 4, 2)]
    assert_same(Told(*layers), data, micro_batches=2, ranks=ranks, schedule=schedule, layers="layers")


def test_layers_may_look_at_a_skip_connection_and_leave_it() -> None:
    """The same tensor is put back: on the stages after, it must be there as it was."""

    class Looks(Plainly):
        def forward(self, x: Tensor) -> Tensor:
            kept = skip.take("a")
            skip.put("a", kept)
            return torch.tanh(self.linear(x + kept))  # type: ignore[operator]

    net = Told([PUT], [], [], [TAKE])
    net.layers[2] = Looks()
    data = [{"x": 0.1 * torch.randn(4, WIDTH)}] * 3
    assert_same(net, data, micro_batches=2, ranks=4, schedule="gpipe", recompute="always", layers="layers")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([[PUT], [PUT], [TAKE]], "'a' is stashed again before it was popped"),
        ([[PUT], [TAKE], [TAKE]], "'a' was popped, but no earlier layer has stashed it"),
        ([[PUT], [], [("put", "b"), TAKE]], "'b' was stashed in this step and not popped"),
    ],
)
def test_plain_functions_that_do_not_fit_raise_over_stages(layers: Any, message: str) -> None:
    with pytest.raises(SkipError, match=message):
        pipelined(Told(*layers), [{"x": torch.ones(2, WIDTH)}], 1, ranks=3, layers="layers")


class Moving(Told):
    """Pops in another layer if the batch is short."""

    def __init__(self, usual: int, other: int) -> None:
        super().__init__([PUT], [], [], [], [])
        self.usual, self.other = usual, other

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[1:]:
            layer.todo = ()
        self.layers[self.other if len(x) < 4 else self.usual].todo = (TAKE,)
        return super().forward(x)


@pytest.mark.parametrize(("usual", "other"), slow_but([(2, 4), (3, 2)], (3, 2)))
def test_a_pop_may_move_to_another_stage(usual: int, other: int) -> None:
    data = [{"x": 0.1 * torch.randn(size, WIDTH)} for size in (4, 4, 2, 4, 2)]
    assert_same(Moving(usual, other), data, micro_batches=1, ranks=5, schedule="gpipe", layers="layers")
