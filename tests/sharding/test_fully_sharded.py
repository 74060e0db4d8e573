"""``shard_optimizer="parameters"``: the replicas divide all parameters, and train as one device does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import pytest

from lightning_pipe.errors import ConfigurationError
from tests.support import oracle
from tests.support.model_zoo import ZOO
from tests.support.oracle import Trace
from tests.support.pairs import pairs
from tests.support.processes import run_trainers
from tests.support.sharded_runs import FAMILIES, MODELS, Sharded, check
from tests.support.trainer_runs import quiet

REPLICAS = [
    # tied and frozen ones, weights outside the layers, recomputed attributes of torch's own
    *("tied_to_layers", "frozen_layers", "weight_norm"),
]
INTERLEAVED = Sharded("interleaved", stages=4, replicas=2, accumulate=2)
RESHARDED = Sharded("zero_bubble", replicas=2, micro_batches=4, reshard=True)
ONE_STAGE = Sharded(stages=1, ranks=1, replicas=2, micro_batches=2, steps=2)
UNLIKE = {"noise", "t5"}
"""Random numbers of replicas are not those of one device; a softmax in single precision."""


@pytest.mark.timeout(120)
def test_replicas_train_as_one_device() -> None:
    check(REPLICAS, Sharded("1f1b", replicas=2, micro_batches=2, steps=2), "data_parallel")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("point", [Sharded("1f1b", replicas=2, steps=5), replace(INTERLEAVED, steps=5)], ids=str)
def test_five_steps(point: Sharded) -> None:
    check(FAMILIES, point, "data_parallel")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "point"),
    pairs(
        ["divides_itself", "residual"],
        [RESHARDED, replace(RESHARDED, reshard=False), ONE_STAGE],
        lambda name, point: (name, point) == (0, 2),
    ),
)
def test_divided_backward_passes_and_one_stage(name: str, point: Sharded) -> None:
    check([name], point, "data_parallel")


def clipped(replicas: int) -> Trace:
    """The weights after a training that limits each value of the gradients, the same batches on each replica."""
    from lightning_pipe import PipeStrategy

    quiet()
    entry = MODELS["pairs"]
    sizes = {"pipeline_parallel_size": 1, "data_parallel_size": replicas}
    own = PipeStrategy("gpipe", 2, **sizes, layers=entry.layers, shard_optimizer="parameters") if replicas > 1 else None
    options = {"devices": replicas, "strategy": own or "auto", "use_distributed_sampler": False}
    trace = oracle.fit(entry.build(), entry.batches(2), clip=1e-3, gradient_clip_algorithm="value", **options)
    return Trace(weights=trace.weights)


class WholeParameters:
    """Notes how many bytes of whole parameters this process has when a stage begins to compute."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[int, int], int] = {}
        self.parameters: Any = None
        self.executor: Any = None

    def forward(self, forward: Callable[..., Any], *args: Any) -> Any:
        """Stands before the forward pass of each layer."""
        action = self.executor.exchange.transport.board.position
        # torch lets a whole parameter live on, and frees its memory
        found = sum(p.untyped_storage().nbytes() for p in self.parameters._whole())
        self.bytes[action.stage, action.micro_batch] = found  # the batch comes behind the look at its losses
        return forward(*args)


def whole_bytes(process: int, reshard: bool, sizes: tuple[int, ...]) -> Any:
    """Whole parameters when each stage begins each micro-batch, and the trained ones; or the error.

    Replicas have batches of these sizes.
    """
    from lightning_pipe import PipeStrategy

    class Observe(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            strategy: Any = trainer.strategy
            observer.parameters, observer.executor = strategy.sharding.parameters, strategy.pipeline.executor
            for _, layer in strategy.pipeline.layers:
                layer.forward = partial(observer.forward, layer.forward)

    quiet()
    entry, observer = MODELS["pairs"], WholeParameters()
    batch = {name: value[: sizes[process]] for name, value in entry.batches(1)[0].items()}
    sizes_of_world = {"pipeline_parallel_size": 1, "data_parallel_size": 2, "stages": 4}
    own = PipeStrategy("1f1b", 4, **sizes_of_world, shard_optimizer="parameters", reshard_after_forward=reshard)
    try:
        trace = oracle.fit(
            entry.build(), [batch], strategy=own, devices=2, use_distributed_sampler=False, callbacks=[Observe()]
        )
    except ConfigurationError as error:
        return str(error)
    return observer.bytes, Trace(weights=trace.weights)


def of_two_replicas(process: int) -> list[Any]:
    """What the tests below compare, of one process."""
    sizes = [(False, (8, 8)), (True, (8, 8)), (True, (8, 3))]
    return [clipped(2), *(whole_bytes(process, reshard, each) for reshard, each in sizes)]


@pytest.fixture(scope="module")
def two_replicas() -> list[list[Any]]:
    return run_trainers(of_two_replicas, 2, timeout=100)


@pytest.mark.timeout(120)
def test_values_of_gradients_are_limited(two_replicas: list[list[Any]]) -> None:
    truth = clipped(1)
    for trace, *_ in two_replicas:
        oracle.assert_equal(trace, truth)


@pytest.mark.timeout(120)
def test_only_the_stage_that_computes_is_whole(two_replicas: list[list[Any]]) -> None:
    _, (kept, weights), (freed, resharded), _ = two_replicas[0]
    truth = oracle.fit(MODELS["pairs"].build(), MODELS["pairs"].batches(1))
    for found in (weights, resharded):
        oracle.assert_equal(found, Trace(weights=truth.weights))
    assert kept.keys() == freed.keys() == {(stage, number) for stage in range(4) for number in range(4)}
    layer = sum(parameter.nbytes for parameter in MODELS["pairs"].build().layers[0].parameters())
    (of_all,), (of_one,) = set(kept.values()), set(freed.values())
    assert of_all - of_one == 3 * layer


@pytest.mark.timeout(120)
def test_other_numbers_of_micro_batches_on_a_replica(two_replicas: list[list[Any]]) -> None:
    for *_, refused in two_replicas:
        assert "a batch of 3 micro-batches and another one of 4" in refused
        assert "drop_last=True" in refused


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "point",
    [
        Sharded("gpipe", replicas=2, recompute="always"),
        replace(INTERLEAVED, steps=2),
        Sharded("zero_bubble", replicas=2, micro_batches=4),
    ],
    ids=str,
)
def test_all_models(point: Sharded) -> None:
    names = [name for name, entry in ZOO.items() if entry.replicas and name not in UNLIKE]
    check(names, point, "data_parallel", timeout=380)
