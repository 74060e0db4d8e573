"""``shard_optimizer="parameters"``: the replicas divide all parameters, and train as one device does."""

from __future__ import annotations

import pytest

from tests.support import oracle
from tests.support.model_zoo import ZOO
from tests.support.oracle import Trace
from tests.support.processes import run_trainers
from tests.support.sharded_runs import Sharded, check
from tests.support.trainer_runs import quiet

REPLICAS = [
    # tied, frozen and shared ones, weights outside the layers, recomputed attributes of torch's own
    *("residual", "gpt2", "llama", "tied_to_layers", "scale_in_two_stages", "shared_by_layers", "frozen_layers"),
    *("weight_norm", "recurrent"),
]
UNLIKE = {"noise", "t5"}
"""Random numbers of replicas are not those of one device; a softmax in single precision."""


@pytest.mark.timeout(120)
def test_replicas_train_as_one_device() -> None:
    check(REPLICAS, Sharded("1f1b", replicas=2), "data_parallel")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "point",
    [
        Sharded("interleaved", stages=4, replicas=2, accumulate=2, steps=2),
        Sharded("zero_bubble", replicas=2, micro_batches=4, recompute="never"),
        Sharded(stages=1, ranks=1, replicas=2),
    ],
    ids=str,
)
def test_several_stages_divided_backward_passes_and_one_stage(point: Sharded) -> None:
    check(["gpt2", "residual", "divides_itself"], point, "data_parallel")


def clipped(process: int, replicas: int) -> Trace:
    """The weights after a training that limits each value of the gradients, the same batches on each replica."""
    from lightning_pipe import PipeStrategy

    quiet()
    entry = ZOO["gpt2"]
    sizes = {"pipeline_parallel_size": 1, "data_parallel_size": replicas}
    own = PipeStrategy("gpipe", 2, **sizes, layers=entry.layers, shard_optimizer="parameters") if replicas > 1 else None
    options = {"devices": replicas, "strategy": own or "auto", "use_distributed_sampler": False}
    trace = oracle.fit(entry.build(), entry.batches(3), clip=1e-3, gradient_clip_algorithm="value", **options)
    return Trace(weights=trace.weights)


@pytest.mark.timeout(100)
def test_values_of_gradients_are_limited() -> None:
    truth = clipped(0, 1)
    for trace in run_trainers(clipped, 2, replicas=2, timeout=80):
        oracle.assert_equal(trace, truth)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "point",
    [
        Sharded("gpipe", replicas=2, recompute="always"),
        Sharded("interleaved", stages=4, replicas=2, accumulate=2, steps=2),
        Sharded("zero_bubble", replicas=2, micro_batches=4),
    ],
    ids=str,
)
def test_all_models(point: Sharded) -> None:
    names = [name for name, entry in ZOO.items() if entry.replicas and name not in UNLIKE]
    check(names, point, "data_parallel", timeout=380)
