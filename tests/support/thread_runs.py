"""Training on the engine under any schedule, with a thread for every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.engine.asynchronous import CallResult
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import divide, find_layers
from lightning_pipe.schedules import Family
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology
from tests.support.threads import run_threads, thread_world


def trained(
    net: nn.Module,
    batches: Sequence[Sequence[Any]],
    ranks: int,
    family: Family,
    loss: Callable[[Any, Any], Tensor],
    optimizer: Callable[[Any], Callable[[], None]],
    layers: Any = None,
    **more: Any,
) -> tuple[list[float], Any, list[int]]:
    """Train under any schedule, with a flush or without.

    Args:
        net: what is trained, as a copy.
        batches: each in its micro-batches.
        ranks: of the pipeline.
        family: the schedule.
        loss: of a network on a micro-batch.
        optimizer: makes what updates a network by its gradients, and forgets them.
        layers: their dotted names, as for `find_layers`.
        more: options of the pipeline.

    Returns:
        The loss of every batch, what is trained, and the most versions of its weights that each rank has held.
    """
    loss_rank = family.build(ranks, 4 * max(ranks, len(batches[0]))).loss_ranks[0]
    world = thread_world(Topology(ranks, loss_rank=loss_rank), timeout=timedelta(seconds=300))
    nets = [copy.deepcopy(net) for _ in world]

    def train(transport: Transport) -> tuple[list[float], int, int]:
        own, losses, held = nets[transport.process], [0.0] * len(batches), [1]
        found = find_layers(own, layers)
        counts = divide(own, found, ranks * family.stages_per_rank, "parameters")
        pipeline = Pipeline(own, found, counts, family, transport, **more)
        pipeline.partition()
        update = optimizer(own)

        def add(batch: int, results: Mapping[int, Tensor]) -> None:
            losses[batch] += sum(float(value.detach()) / len(batches[batch]) for value in results.values())

        def take(calls: Iterable[CallResult]) -> None:
            for call in calls:
                if call.update:
                    update()
                for batch, results in call.results.items():
                    add(batch, results)
                assert pipeline.asynchronous is not None
                held.append(len(pipeline.asynchronous.versions.stash) + 1)

        for number, parts in enumerate(batches):
            given: Any = (lambda _, part: loss(own, part), parts, [1 / len(parts)] * len(parts))
            if pipeline.asynchronous is None:
                results: Any = pipeline.train(*given, seed=number)
                update()
                add(number, results)
            else:
                take([pipeline.asynchronous.advance(*given, seed=number)])
        if pipeline.asynchronous is not None:
            take(pipeline.asynchronous.drain())
        pipeline.restore()
        return losses, transport.rank, max(held)

    found = run_threads(world, train, timeout=7200)
    losses = [sum(each) for each in zip(*(own for own, _, _ in found), strict=True)]
    return losses, nets[0], [most for _, most in sorted(each[1:] for each in found)]


def stepping(optimizer: torch.optim.Optimizer, scheduler: Any = None) -> Callable[[], None]:
    """Updates by the gradients there are, and forgets them.

    Args:
        optimizer: of a network.
        scheduler: of its learning rates.
    """

    def update() -> None:
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()

    return update
