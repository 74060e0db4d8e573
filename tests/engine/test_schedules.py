"""Every synchronous schedule that is registered, run by the engine: the numbers of one device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules import (
    GEMS,
    Action,
    Chimera,
    DualPipe,
    DualPipeV,
    Family,
    InterleavedZeroBubble,
    Kind,
    ZeroBubble,
    registry,
)
from lightning_pipe.simulate import simulate
from tests.support import equality_sweep
from tests.support.engine_runs import Batch, assert_same, pipelined
from tests.support.equality_sweep import Point
from tests.support.model_zoo import Entry
from tests.support.pairs import pairs, slow_but
from tests.support.small_net import Block
from tests.support.zoo.base import Block as ResidualBlock
from tests.support.zoo.base import Regression
from tests.support.zoo.batches import odd_batches

WIDTH = 6

pytestmark = pytest.mark.usefixtures("float64")


class Tied(nn.Module):
    """Eight layers; one matrix before and behind them, a scale and a norm between, a tensor carried past all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(8))
        self.layers[5].linear.bias = self.layers[2].linear.bias
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = first = self.embed(x)
        for number, layer in enumerate(self.layers):
            h = h + self.scale[number] * layer(self.norm(h))
        return F.mse_loss(F.linear(h + first, self.embed.weight), y)


def families() -> Iterator[Family]:
    for name in schedules.names():
        family = schedules.get(name)
        if family.synchronous:
            yield from family.variants()


def label(family: Family) -> str:
    return "-".join([family.name, *(str(value) for value in family.options().values())])


def batches(samples: int, count: int = 2) -> list[Batch]:
    return [{"x": torch.randn(samples, WIDTH), "y": torch.randn(samples, WIDTH)} for _ in range(count)]


def check(family: Family, ranks: int, micro_batches: int, recompute: Any = "never") -> None:
    """The numbers of one device, with no more activations held than the schedule says."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule = schedules.with_recompute(family.build(ranks, micro_batches), recompute)
            data = batches(2 * micro_batches + 1)
            options = {"ranks": ranks, "schedule": family, "recompute": recompute, "layers": "layers"}
            found = assert_same(Tied(), data, micro_batches, **options)
    except ScheduleError as error:
        pytest.skip(str(error))
    peaks = simulate(schedule).peak_activations
    for pipeline in found.pipelines:
        assert pipeline.executor.peak_held == peaks[pipeline.transport.rank]
        assert not pipeline.executor.saved


@pytest.mark.parametrize(
    ("family", "ranks", "micro_batches"),
    pairs(
        list(families()),
        [(2, 3), (4, 5), *sorted({*product((1, 2, 4), (1, 2, 3, 8, 16, 17))} - {(2, 3)})],
        lambda family, size: size == (family in (3, 7, 13, 16)),  # the others differ from these by their order alone
    ),
)
def test_equals_one_device(family: Family, ranks: int, micro_batches: int) -> None:
    check(family, ranks, micro_batches)


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        pytest.param(
            family, mode, id=f"{label(family)}-{mode}", marks=() if (number, other) == (1, 0) else pytest.mark.slow
        )
        for number, family in enumerate(families())
        for other, mode in enumerate(["except_last", "always"])
    ],
)
def test_recomputation_equals_one_device(family: Family, recompute: str) -> None:
    check(family, 2, 4, recompute=recompute)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 8, 17])
@pytest.mark.parametrize("family", [family for family in families() if family.stages_per_rank == 1], ids=label)
def test_equals_one_device_on_eight_ranks(family: Family, micro_batches: int) -> None:
    check(family, 8, micro_batches)


class TiedAtBothEnds(Regression):
    """Layers; one matrix before and behind them, one bias in two of them, a norm and scales between."""

    def __init__(self, depth: int) -> None:
        super().__init__([ResidualBlock() for _ in range(depth)])
        self.layers[depth - 2].linear.bias = self.layers[2].linear.bias
        self.norm = nn.LayerNorm(self.embed.in_features)
        self.scale = nn.Parameter(torch.rand(depth))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for number, layer in enumerate(self.layers):
            h = h + self.scale[number] * layer(self.norm(h))
        return self.head(F.linear(h, self.embed.weight))


@pytest.mark.parametrize(
    ("family", "ranks"), pairs(list(families()), [2, 4, 8], lambda family, ranks: ranks == 0 and family == 5)
)
def test_replicas_accumulation_clipping_and_evaluation_at_once(family: Family, ranks: int) -> None:
    """Tied weights, uneven batches, of which every third has fewer samples; two replicas, two batches in a step."""
    stages = ranks * family.stages_per_rank
    options = {"replicas": 2, "accumulate": 2, "clip": 0.05, "evaluate": True, "steps": 2}
    tied = Entry("tied_at_both_ends", partial(TiedAtBothEnds, max(6, 2 * ranks)), odd_batches, layers="layers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        equality_sweep.check(tied, Point(family, stages, micro_batches=3, ranks=ranks, **options))  # type: ignore[arg-type]


class Twice(nn.Module):
    """Uses its weight twice, in a part that torch computes again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.reentrant = nn.Linear(WIDTH, WIDTH), reentrant

    def forward(self, x: Tensor) -> Tensor:
        def twice(x: Tensor) -> Tensor:
            return torch.tanh(self.linear(torch.tanh(self.linear(x))))

        return checkpoint(twice, x, use_reentrant=self.reentrant)


class TiedTwice(Tied):
    """Layers of two stages share a whole layer."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Twice(reentrant) for _ in range(8))
        self.layers[6].linear = self.layers[1].linear


@pytest.mark.parametrize(
    ("family", "reentrant", "recompute"),
    pairs(
        [ZeroBubble(), ZeroBubble("h2"), ZeroBubble("v"), InterleavedZeroBubble(), DualPipe(), DualPipeV()],
        [(False, "always"), (True, "never"), (False, "never"), (True, "always")],
        lambda family, other: other < 2 and family == 4 * other,
    ),
)
def test_halves_of_backward_passes_of_shared_and_checkpointed_layers(
    family: Family, reentrant: bool, recompute: Any
) -> None:
    options = {"ranks": 2, "schedule": family, "layers": "layers", "recompute": recompute}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(TiedTwice(reentrant), batches(9), 4, **options)


@pytest.mark.parametrize(
    "family",
    slow_but(
        [
            *(Chimera(pipes, sync=sync) for pipes in (2, 4) for sync in ("eager", "eager_opt", "lazy")),  # type: ignore[arg-type]
            GEMS(),
            DualPipe(),
        ],
        Chimera(4, sync="lazy"),
    ),
    ids=label,
)
def test_copies_of_a_stage_stay_the_same_to_the_bit(family: Family) -> None:
    held: dict[tuple[int, int], dict[str, Tensor]] = {}

    def look(pipeline: Pipeline, module: nn.Module) -> None:
        values = {name: value.detach().clone() for name, value in pipeline.local_parameters()}
        held[pipeline.transport.rank, sum(rank == pipeline.transport.rank for rank, _ in held)] = values

    options: dict[str, Any] = {"optimizer": torch.optim.Adam, "between": look, "layers": "layers"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipelined(Tied(), batches(7, count=3), 5, ranks=4, schedule=family, **options)
    several = 0
    for number in range(3):
        first: dict[str, Tensor] = {}
        for rank in range(4):
            for name, value in held[rank, number].items():
                several += name in first
                assert torch.equal(first.setdefault(name, value), value), (name, rank, number)
    assert several


def test_a_schedule_of_ones_own_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the README shows it; by name, and from the file that it writes."""
    monkeypatch.setattr(registry, "_families", dict(registry._families))

    @schedules.register("gpipe_in_order")
    def gpipe_in_order(ranks: int, micro_batches: int) -> list[list[Action]]:
        return [
            [Action(kind, rank, index) for kind in (Kind.FORWARD, Kind.BACKWARD) for index in range(micro_batches)]
            for rank in range(ranks)
        ]

    check(schedules.get("gpipe_in_order"), 4, 3)
    schedules.get("gpipe_in_order").build(2, 5).to_csv(tmp_path / "order.csv")
    check(schedules.get(tmp_path / "order.csv"), 2, 5)
