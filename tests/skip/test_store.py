"""Layers that stash and pop by the plain functions, over stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe import skip
from lightning_pipe.errors import CutError
from lightning_pipe.skip import SkipError
from tests.support.engine_runs import assert_same, pipelined

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
REUSES = [
    pytest.param([[PUT], [TAKE, PUT], [], [TAKE]], id="again under the same name"),
    pytest.param([[PUT], [], [TAKE, PUT, TAKE], []], id="put back and taken at once"),
    pytest.param([[PUT, ("put", "b")], [TAKE], [("put", "a")], [("take", "b"), TAKE]], id="two at once"),
]


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "chimera"])
@pytest.mark.parametrize("layers", REUSES)
def test_plain_functions_may_use_a_name_again(layers: Any, schedule: str) -> None:
    torch.manual_seed(0)
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


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_what_the_plain_functions_stash_goes_straight_from_the_second_batch_on(recompute: str) -> None:
    sent: dict[int, list[int]] = {rank: [] for rank in range(4)}

    def note(pipeline: Any, module: nn.Module) -> None:
        sent[pipeline.transport.rank].append(pipeline.executor.sent_bytes)
        with torch.no_grad():
            pipeline.evaluate(lambda _, part: module(**part), [data[0]])

    data = [{"x": 0.1 * torch.randn(4, WIDTH)}] * 4
    net = Told([], [PUT], [], [], [TAKE])
    options: dict[str, Any] = {"layers": "layers", "recompute": recompute, "schedule": "gpipe", "between": note}
    assert_same(net, data, micro_batches=1, ranks=4, balance=[2, 1, 1, 1], **options)
    # activations of training and evaluation and gradients: beside the skip's each rank sends one to its neighbours
    tensors = {0: 2 * 2, 1: 2 + 1, 2: 2 + 1, 3: 2}
    for rank, expected in tensors.items():
        assert sent[rank][-1] - sent[rank][-2] == pytest.approx(expected * 4 * WIDTH * 8, abs=1000), rank


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


def test_a_pop_that_moves_to_a_later_stage_is_served_and_to_an_earlier_one_raises() -> None:
    data = [{"x": 0.1 * torch.randn(size, WIDTH)} for size in (4, 4, 2, 4, 2)]
    options: dict[str, Any] = {"ranks": 5, "schedule": "gpipe", "layers": "layers"}
    assert_same(Moving(2, 4), data, micro_batches=1, **options)
    with pytest.raises(CutError, match=r"layers\.2 \(skip\)' needs"):
        pipelined(Moving(3, 2), data, 1, **options)
