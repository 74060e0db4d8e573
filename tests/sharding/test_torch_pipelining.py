"""A second oracle: torch's own pipelining over stages that FSDP2 divides trains to the same losses and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipe.local_parts import is_divided, whole
from tests.support import oracle
from tests.support.processes import run_trainers, run_world
from tests.support.sharded_runs import MODELS
from tests.support.trainer_runs import quiet

MICRO_BATCHES, STEPS = 4, 5
STAGES = {"1f1b": 2, "interleaved": 4}


def by_torch(process: int, schedule: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses, where they are, and the weights of this process's stages."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    count, rank, replica = STAGES[schedule], mesh.get_local_rank("pipeline"), mesh.get_local_rank("data")
    entry: Any = MODELS["pairs"]
    module = entry.build()
    parts = [module.embed, *module.layers, module.head]
    spans = [range(3), range(3, 6)] if count == 2 else [range(2), range(2, 3), range(3, 4), range(4, 6)]
    stages = []
    for number in range(rank, count, 2):
        part = nn.Sequential(*(parts[at] for at in spans[number]))
        for layer in part:
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(part, mesh=mesh["data"])
        stages.append(PipelineStage(part, number, count, torch.device("cpu"), group=mesh.get_group("pipeline")))
    kinds: dict[str, Any] = {"n_microbatches": MICRO_BATCHES, "loss_fn": F.mse_loss}
    own = Schedule1F1B(stages[0], **kinds) if count == 2 else ScheduleInterleaved1F1B(stages, **kinds)
    held = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(held, lr=0.02, eps=1e-3)
    found: list[float] = []
    for batch in entry.batches(2 * STEPS)[replica::2]:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        last = {"target": batch["y"], "losses": losses} if rank == 1 else {}
        own.step(*([batch["x"]] if rank == 0 else []), **last)
        optimizer.step()
        found += [float(torch.stack(losses).mean())] if losses else []
    return found, {name: whole(p.detach()) for name, p in module.named_parameters() if is_divided(p)}


def by_us(process: int, schedule: str) -> tuple[list[float], dict[str, Tensor]]:
    """The same by the strategy."""
    from lightning_pipe import PipeStrategy

    quiet()
    entry = MODELS["pairs"]
    sizes: dict[str, Any] = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "stages": STAGES[schedule]}
    own = PipeStrategy(schedule, MICRO_BATCHES, **sizes, rank_order="replicas", shard_optimizer="parameters")
    batches = entry.batches(2 * STEPS)[process % 2 :: 2]
    options = {"devices": 4, "use_distributed_sampler": False, "clip": None}
    trace = oracle.fit(entry.build(), batches, strategy=own, **options)
    return trace.losses, trace.weights


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("schedule", STAGES)
def test_torch_pipelining_over_sharded_stages(schedule: str) -> None:
    ours = run_trainers(by_us, 4, timeout=70, schedule=schedule)
    theirs = run_world(by_torch, 4, timeout=70, schedule=schedule)
    names: set[str] = set()
    for process, (losses, weights) in enumerate(theirs):
        names |= weights.keys()
        found, all_weights = ours[process]
        assert len(found) == STEPS
        assert process < 2 or losses
        oracle.assert_equal(oracle.Trace(losses=found), oracle.Trace(losses=losses))
        held = {name: all_weights[name] for name in weights}
        oracle.assert_equal(oracle.Trace(weights=held), oracle.Trace(weights=weights))
    assert names == ours[0][1].keys()
