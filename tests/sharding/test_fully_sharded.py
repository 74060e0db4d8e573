"""``shard_optimizer="parameters"``: the replicas divide all parameters, and train as one device does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import pytest
from torch import Tensor

from lightning_pipe.errors import ConfigurationError
from tests.support import oracle
from tests.support.model_zoo import ZOO
from tests.support.oracle import Trace
from tests.support.processes import in_turn
from tests.support.sharded_runs import FAMILIES, MODELS, Sharded, check, compare, fit_all
from tests.support.trainer_runs import quiet

INTERLEAVED = Sharded("interleaved", stages=4, replicas=2, accumulate=2)
RESHARDED = Sharded("zero_bubble", replicas=2, micro_batches=4, reshard=True)
ONE_STAGE = Sharded(stages=1, ranks=1, replicas=2, micro_batches=2, steps=2, looks=False)
"""Here, losses are compared by test_whole_product among the fast tests."""
ON_EACH_REPLICA = {
    "frozen_layers": replace(ONE_STAGE, stages=2),
    "weight_norm": replace(ONE_STAGE, stages=2),
    "marked": replace(ONE_STAGE, stages=2),
    "divides_itself": ONE_STAGE,
}
"""Frozen parameters, recomputed attributes of torch's own, hooks, and a module's own division, on replicas alone."""
UNLIKE = {"noise", "t5"}
"""Random numbers of replicas are not those of one device; a softmax in single precision."""


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    """What the tests of two processes compare, each of which is a replica."""
    trained = {name: partial(fit_all, names=[name], point=point) for name, point in ON_EACH_REPLICA.items()}
    kept, freed = (partial(whole_bytes, reshard=reshard, sizes=(8, 8)) for reshard in (False, True))
    # an error comes last: no run goes on behind it
    refused = partial(whole_bytes, reshard=True, sizes=(8, 3))
    return in_turn({**trained, "kept": kept, "freed": freed, "refused": refused}, 2)


@pytest.mark.timeout(120)
def test_ranks_of_replicas_train_as_one_device() -> None:
    """The first and the last rank have a parameter in common."""
    check(["tied_to_layers"], Sharded("1f1b", replicas=2, micro_batches=2, steps=2, looks=False), "data_parallel")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ON_EACH_REPLICA)
def test_replicas_train_as_one_device(name: str, found: dict[str, list[Any]]) -> None:
    compare(found[name], [name], ON_EACH_REPLICA[name], "data_parallel")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("point", [Sharded("1f1b", replicas=2, steps=5), replace(INTERLEAVED, steps=5)], ids=str)
def test_five_steps(point: Sharded) -> None:
    check(FAMILIES, point, "data_parallel")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "point"),
    [
        *(("divides_itself", point) for point in (RESHARDED, replace(RESHARDED, reshard=False))),
        *(("residual", point) for point in (RESHARDED, replace(RESHARDED, reshard=False), ONE_STAGE)),
    ],
    ids=str,
)
def test_divided_backward_passes_and_one_stage(name: str, point: Sharded) -> None:
    check([name], point, "data_parallel")


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
        whole = [whole for _, whole in self.parameters._parameters(*self.parameters._order) if whole is not None]
        found = sum(parameter.untyped_storage().nbytes() for parameter in whole)
        self.bytes[action.stage, action.micro_batch] = found
        return forward(*args)


def limited(batch: dict[str, Tensor], **options: Any) -> Trace:
    """The weights after a step that limits each value of the gradients."""
    options |= {"clip": 1e-3, "gradient_clip_algorithm": "value", "use_distributed_sampler": False}
    return Trace(weights=oracle.fit(MODELS["pairs"].build(), [batch], **options).weights)


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
    observer = WholeParameters()
    batch = {name: value[: sizes[process]] for name, value in MODELS["pairs"].batches(1)[0].items()}
    options: dict[str, Any] = {"pipeline_parallel_size": 1, "data_parallel_size": 2, "stages": 4}
    options |= {"shard_optimizer": "parameters", "reshard_after_forward": reshard, "compare_losses": False}
    try:
        trace = limited(batch, strategy=PipeStrategy("1f1b", 4, **options), devices=2, callbacks=[Observe()])
    except ConfigurationError as error:
        return str(error)
    return observer.bytes, trace


@pytest.mark.timeout(120)
def test_only_the_stage_that_computes_is_whole_and_values_of_gradients_are_limited(
    found: dict[str, list[Any]],
) -> None:
    truth = limited(MODELS["pairs"].batches(1)[0])
    for (kept, weights), (freed, resharded) in zip(found["kept"], found["freed"], strict=True):
        oracle.assert_equal(weights, truth)
        oracle.assert_equal(resharded, truth)
        assert kept.keys() == freed.keys() == {(stage, number) for stage in range(4) for number in range(4)}
        layer = sum(parameter.nbytes for parameter in MODELS["pairs"].build().layers[0].parameters())
        (of_all,), (of_one,) = set(kept.values()), set(freed.values())
        assert of_all - of_one == 3 * layer


@pytest.mark.timeout(120)
def test_other_numbers_of_micro_batches_on_a_replica(found: dict[str, list[Any]]) -> None:
    for refused in found["refused"]:
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
