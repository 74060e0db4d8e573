"""Schedules without a flush against the closed forms of their papers, computed in one process from the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.engine.weight_versions import WeightVersions
from lightning_pipe.errors import ConfigurationError, PartitionError
from lightning_pipe.partition import find_layers
from lightning_pipe.schedules import Family, OneFOneB, PipeDream, PipeDream2BW
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.single_process import SingleProcess
from lightning_pipe.transport.topology import Topology
from tests.support.asynchronous_engine import (
    BATCHES,
    WIDTH,
    Block,
    Net,
    Result,
    Version,
    adam,
    assert_same,
    batches,
    closed_form,
    merged,
    pipedream,
    pipelined,
    sgd,
    train,
    two_versions,
    vertical,
)
from tests.support.pairs import pairs, slow_but
from tests.support.processes import run_pipeline
from tests.support.threads import ThreadTransport

DRAINS = [(), (7,), (2, 3, 8)]
WITH_AND_WITHOUT = [(7,), pytest.param((), marks=pytest.mark.slow)]


pytestmark = pytest.mark.usefixtures("float64")


# ------------------------------------------------------------------ the papers


@pytest.mark.parametrize(
    ("ranks", "optimizer", "drains"),
    slow_but(
        product([1, 2, 3, 4], [sgd, adam], DRAINS)
    ),  # fast: test_batches_of_several_shapes_and_paths, test_processes
)
def test_pipedream(ranks: int, optimizer: Any, drains: tuple[int, ...]) -> None:
    model = Net()
    found = pipelined(model, batches(), ranks, PipeDream(), optimizer, drains=drains)
    assert_same(found, closed_form(model, batches(), ranks, pipedream(ranks), optimizer, drains=drains))


@pytest.mark.parametrize("drains", WITH_AND_WITHOUT, ids=str)
@pytest.mark.parametrize("ranks", slow_but([2, 3, 4], 3))
def test_vertical_sync(ranks: int, drains: tuple[int, ...]) -> None:
    model = Net()
    found = pipelined(model, batches(), ranks, PipeDream(vertical_sync=True), drains=drains)
    assert_same(found, closed_form(model, batches(), ranks, vertical(ranks), drains=drains))


@pytest.mark.parametrize(
    ("ranks", "size", "drains"),
    slow_but(product([1, 2, 4], [4, 6, 8], DRAINS[:2])),  # fast: test_recomputation, test_layers_of_every_kind
)
def test_2bw(ranks: int, size: int, drains: tuple[int, ...]) -> None:
    model, optimizer = Net(), adam if size == 4 else sgd
    found = pipelined(model, batches(), ranks, PipeDream2BW(size), optimizer, micro_batches=size, drains=drains)
    truth = closed_form(model, batches(), ranks, two_versions, optimizer, micro_batches=size, drains=drains)
    assert_same(found, truth)


@pytest.mark.parametrize("drains", WITH_AND_WITHOUT, ids=str)
@pytest.mark.parametrize(
    ("replicas", "version", "micro_batches"),
    [
        # fast: two ranks for the first stage under the Trainer
        pytest.param((2, 1, 1), lambda s, t: max(0, (t // 2 - 1, t - 1, t)[s]), 1, marks=pytest.mark.slow),
        pytest.param((3, 1), lambda s, t: max(0, (t // 3 - 1, t)[s]), 1, marks=pytest.mark.slow),
        pytest.param((1, 2), lambda s, t: max(0, (t - 2, t // 2)[s]), 1, marks=pytest.mark.slow),
        ((2, 2), lambda s, t: max(0, (t - 1, t)[s]), 2),
    ],
    ids=["2-1-1", "3-1", "1-2", "2-2"],
)
def test_replicated_stages(
    replicas: tuple[int, ...], version: Version, micro_batches: int, drains: tuple[int, ...]
) -> None:
    model, family = Net(), PipeDream(replicas=replicas)
    # the minibatches of a batch that is cut into as many as there are replicas make one step
    together = [size // micro_batches for size in replicas]
    options: dict[str, Any] = {"micro_batches": micro_batches, "drains": drains}
    found = pipelined(model, batches(), sum(replicas), family, **options)
    assert_same(found, closed_form(model, batches(), len(replicas), version, together=together, **options))


def test_pipedream_is_not_sgd_nor_vertical_sync() -> None:
    model = Net()
    plain, stashed, synced = (
        closed_form(model, batches(), 4, version).values["head.weight"]
        for version in (lambda stage, t: t, pipedream(4), vertical(4))
    )
    for one, other in ((plain, stashed), (plain, synced), (stashed, synced)):
        assert float((one - other).abs().max()) > 1e-4


# ------------------------------------------------------------------ counters


@pytest.mark.parametrize(
    ("family", "versions"),
    slow_but(
        [
            (PipeDream(), [4, 3, 2, 1]),
            (PipeDream(vertical_sync=True), [4, 4, 4, 4]),
            (PipeDream2BW(4), [2, 2, 2, 2]),
            (PipeDream(replicas=(2, 1, 1)), [2, 2, 2, 1]),
        ],
        (PipeDream(), [4, 3, 2, 1]),
        (PipeDream2BW(4), [2, 2, 2, 2]),
    ),
    ids=str,
)
def test_versions_and_activations_held_are_those_of_the_schedule(
    family: Family, versions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[int, tuple[int, int]] = {}
    most: dict[WeightVersions, int] = {}
    keep = WeightVersions.keep

    def counted(of_rank: WeightVersions, oldest: int, *, steps: bool) -> None:
        keep(of_rank, oldest, steps=steps)
        most[of_rank] = max(most.get(of_rank, 1), len(of_rank.stash) + 1)

    def count(pipeline: Pipeline) -> None:
        assert pipeline.asynchronous is not None
        assert not pipeline.executor.saved
        held[pipeline.transport.rank] = most[pipeline.asynchronous.versions], pipeline.executor.peak_held

    monkeypatch.setattr(WeightVersions, "keep", counted)

    size = 4 if isinstance(family, PipeDream2BW) else 1
    pipelined(Net(), batches(6), 4, family, micro_batches=size, finish=count)
    assert [held[rank][0] for rank in range(4)] == versions
    activations = [2, 2, 2, 1] if family == PipeDream(replicas=(2, 1, 1)) else [4, 3, 2, 1]
    assert [held[rank][1] for rank in range(4)] == activations


# ------------------------------------------------------------------ models and options


class Recurrent(nn.Module):
    """Its class keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Hidden(Block):
    """Uses its parameters past its module."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [*self.linear.parameters()]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(nn.functional.linear(x, *self.hidden))


class Checkpointed(Block):
    """Runs again in its backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class Dropped(Block):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


@pytest.mark.parametrize(
    ("layer", "family"),
    pairs(
        [Hidden, Checkpointed, Recurrent, Normed],
        [PipeDream(), PipeDream2BW(3)],
        lambda layer, family: family == int(layer == 0),
    ),
)
def test_layers_of_every_kind(layer: Callable[[], nn.Module], family: Family) -> None:
    model, size = Net(layer, depth=3), 3 if isinstance(family, PipeDream2BW) else 1
    version = two_versions if size > 1 else pipedream(3)
    found = pipelined(model, batches(6), 3, family, micro_batches=size)
    assert_same(found, closed_form(model, batches(6), 3, version, micro_batches=size))


def test_batches_of_several_shapes_and_paths() -> None:
    data = batches(10, rows=(8, 8, 5, 8, 1), scale=(1.0, 1.0, 0.5))
    model = Net()
    found = pipelined(model, data, 3, PipeDream(), drains=(7,))
    assert_same(found, closed_form(model, data, 3, pipedream(3), drains=(7,)))


def test_more_stages_than_ranks_and_more_pipelines_than_one() -> None:
    model = Net()
    found = pipelined(model, batches(), 2, PipeDream(), stages=4)
    # versions depend on ranks alone: two stages on each keep in step
    assert_same(found, closed_form(model, batches(), 4, lambda stage, t: max(0, t - (stage < 2))))
    found = pipelined(model, batches(), 2, PipeDream(), replicas=2, drains=(5,))
    assert_same(found, closed_form(model, batches(), 2, pipedream(2), micro_batches=2, drains=(5,)))


def test_tied_weights_of_the_first_and_the_last_stage() -> None:
    model = Net()
    model.head.load_state_dict(model.embed.state_dict())
    tied = [("embed.weight", "head.weight"), ("embed.bias", "head.bias")]
    expected = closed_form(model, batches(), 3, pipedream(3), tied=tied, drains=(9,))
    model.head = model.embed
    assert_same(pipelined(model, batches(), 3, PipeDream(), drains=(9,)), expected)


def test_frozen_layers() -> None:
    model = Net()
    model.embed.requires_grad_(False)
    model.layers[:3].requires_grad_(False)
    assert_same(pipelined(model, batches(6), 3, PipeDream()), closed_form(model, batches(6), 3, pipedream(3)))


@pytest.mark.parametrize(
    ("mode", "family"),  # the other family also: test_processes
    pairs(["always", "except_last"], [PipeDream2BW(4), PipeDream()], lambda mode, family: mode == family == 0),
)
def test_recomputation(mode: str, family: Family) -> None:
    model, data = Net(), batches()
    ranks, size, version = (2, 4, two_versions) if isinstance(family, PipeDream2BW) else (3, 1, pipedream(3))
    found = pipelined(model, data, ranks, family, micro_batches=size, drains=(7,), recompute=mode)
    assert_same(found, closed_form(model, data, ranks, version, micro_batches=size, drains=(7,)))


def test_agreed_messages_take_the_fast_way(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = ThreadTransport.send_object
    monkeypatch.setattr(ThreadTransport, "send_object", lambda *args: (sent.append(1), send(*args))[1])
    pipelined(Net(), batches(), 3, PipeDream(), drains=(7,))
    # the first batch and those that set out before it had come back, over two cuts; the evaluation
    assert len(sent) == 2 * 3 + 2


@pytest.mark.parametrize("local", slow_but([True, False], True))
def test_processes(local: bool) -> None:
    plain, dropped, again = zip(*run_pipeline(_process, Topology(2, loss_rank=1), local=local), strict=True)
    torch.manual_seed(0)
    assert_same(merged(plain), closed_form(Net(), batches(), 2, pipedream(2), adam, drains=(9,)))
    # random numbers depend on the batch, not on what else is in flight
    assert_same(merged(again), merged(dropped))


def _process(transport: Transport) -> tuple[Result, Result, Result]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, dropping = Net(), Net(Dropped)
    plain = train(transport, model, batches(), PipeDream(), adam, stages=2, drains=(9,))
    dropped, again = (
        train(transport, copy.deepcopy(dropping), batches(5), PipeDream(), adam, stages=2, recompute=mode)
        for mode in ("never", "always")
    )
    return plain, dropped, again


# ------------------------------------------------------------------ what cannot be


def test_what_cannot_be_exact_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="mixes the micro-batches of several batches"):
        pipelined(Net(Normed), batches(), 2, PipeDream2BW(4), deferred_batch_norm=True)
    with pytest.raises(ConfigurationError, match="differ on the ranks of a replicated stage"):
        pipelined(Net(Normed), batches(), 3, PipeDream(replicas=(2, 1)))
    model = Net()
    model.head = model.embed
    with pytest.raises(PartitionError, match="lets step for different batches"):
        pipelined(model, batches(), 3, PipeDream(replicas=(2, 1)))
    with pytest.raises(ConfigurationError, match="made for 2 in each"):
        pipelined(Net(), batches(), 2, PipeDream2BW(2), micro_batches=4)


def test_calls_in_the_wrong_order_are_refused() -> None:
    model = Net()

    def build(family: Family) -> tuple[Pipeline, Callable[..., Tensor], list[Any]]:
        transport = SingleProcess()
        pipeline = Pipeline(model, find_layers(model, "layers"), [3, 3], family, transport)
        return pipeline, lambda index, part: model(**part), [batches(1)[0]]

    assert build(OneFOneB())[0].asynchronous is None
    pipeline, step, parts = build(PipeDream())
    with pytest.raises(ConfigurationError, match="does not finish a batch"):
        pipeline.train(step, parts, [1.0])


def test_a_step_that_fails_leaves_an_empty_pipeline() -> None:
    model = Net()
    transport = SingleProcess()
    pipeline = Pipeline(model, find_layers(model, "layers"), [6], PipeDream2BW(2), transport)
    parts = [batches(2)[0], batches(2)[1]]

    def fail(index: int, part: Any) -> Tensor:
        if index:
            raise ZeroDivisionError
        return model(**part)

    assert pipeline.asynchronous is not None
    with pytest.raises(ZeroDivisionError):
        pipeline.asynchronous.advance(fail, parts, [0.5, 0.5])
    assert not any(isinstance(p, nn.Parameter) and p.grad is not None for p in model.parameters())
    assert not pipeline.asynchronous.in_flight
    turn = pipeline.asynchronous.advance(lambda index, part: model(**part), parts, [0.5, 0.5])
    assert ([*turn.results], turn.update) == ([1], (1,))
    assert BATCHES > len(turn.results[1]) == 2
