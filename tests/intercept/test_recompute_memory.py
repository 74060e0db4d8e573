"""What recomputation holds: one micro-batch, and what crosses the cuts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.single_process import SingleProcess
from tests.intercept.test_recompute import Recompute, gradients_of


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Bytes that graphs hold at present, and the most at any time, counted by saved-tensor hooks."""
    count = [0, 0]

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()  # a node that held its own result would hold itself
            count[0] += tensor.nbytes
            count[1] = max(count)

        def __del__(self) -> None:
            count[0] -= self.tensor.nbytes

    def pack(tensor: Tensor) -> Any:
        return tensor if isinstance(tensor, nn.Parameter) else Kept(tensor)

    def unpack(kept: Any) -> Tensor:
        return kept.tensor if isinstance(kept, Kept) else kept  # type: ignore[no-any-return]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield count


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(16, 16), nn.Tanh(), nn.Sigmoid())))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_beside_one_micro_batch_only_what_crosses_the_cuts_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, parts, boundary = Deep(), list(torch.randn(80, 16).tensor_split(8)), 10 * 16 * 4
    transport = SingleProcess()
    pipeline = Pipeline(
        net, find_layers(net, "layers"), [6, 6, 6], schedules.get("gpipe"), transport, recompute="always"
    )
    held: list[int] = []
    recompute = pipeline.executor.stages.recompute

    def counted(stage: int, micro_batch: int, batch: Any, kept: Any) -> Any:
        waiting = [*pipeline.executor.kept.values(), kept]
        held.append(
            sum(t.nbytes for each in waiting if each.inbound is not None for t in each.inbound.tensors.values())
        )
        return recompute(stage, micro_batch, batch, kept)

    monkeypatch.setattr(pipeline.executor.stages, "recompute", counted)
    with saved_bytes() as count:
        pipeline.train(lambda _, part: net(part), parts, [1 / 8] * 8)
    with saved_bytes() as one:
        gradients_of(net, parts[:1], "never", stages=3)
    assert max(held) == (2 * 8 - 1) * boundary  # two stages have inputs; the last micro-batch is not computed again
    assert count[1] <= one[1] * 1.01  # of all three stages together: A


class Vocabulary(nn.Module):
    """The logits are the largest thing by far."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.head = nn.Linear(4, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)).log_softmax(-1).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("recompute", ["except_last", "always"])
def test_the_logits_of_one_micro_batch_are_held_at_a_time(recompute: Recompute, schedule: str) -> None:
    torch.manual_seed(0)
    parts = list(torch.randn(8, 4).tensor_split(8))
    with saved_bytes() as one:
        gradients_of(Vocabulary(), parts[:1], "never")
    with saved_bytes() as count:
        gradients_of(Vocabulary(), parts, recompute, schedule=schedule)
    assert count[1] < 1.5 * one[1]
