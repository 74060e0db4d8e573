"""How a module would be cut, without starting processes and without a single weight."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_pipe import schedules
from lightning_pipe.config import Auto, BatchEquation, Layout, micro_batch_count
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.partition import Balance, divide, find_layers, held_by_stages
from lightning_pipe.pipeline.topology import Topology
from lightning_pipe.plan_text import Plan, StagePlan
from lightning_pipe.schedules import Family, Schedule
from lightning_pipe.simulate import Costs, simulate

BYTES_PER_NUMBER = 4
STATES = 3
"""Numbers per trained parameter besides itself: its gradient and two moments of the optimizer."""


def plan(
    module: nn.Module,
    ranks: int,
    *,
    batch: int,
    schedule: str | Family | Schedule = "1f1b",
    stages: int | Auto = "auto",
    micro_batches: int | Auto = "auto",
    layers: str | Sequence[str] | None = None,
    balance: Balance = "parameters",
    accumulation: int = 1,
) -> Plan:
    """The plan of one pipeline.

    Args:
        module: mostly a LightningModule; its parameters may be without values (on the meta device).
        ranks: in the pipeline.
        batch: samples in a batch.
        schedule: as for `PipeStrategy`, and so are ``stages``, ``micro_batches``, ``layers`` and ``balance``.
        stages: the module is cut into.
        micro_batches: a batch is cut into.
        layers: dotted names of the layer sequence.
        balance: what the stages are to have the same of.
        accumulation: batches in an optimizer step.

    Raises:
        PipeError: the module cannot be cut like this.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        >>> [stage.layers for stage in plan(module, ranks=2, batch=16).stages]
        [('0', '1'), ('2', '3')]
    """
    if ranks < 1 or batch < 1:
        raise ConfigurationError(f"A plan needs at least one rank and one sample, not ranks={ranks}, batch={batch}.")
    family = schedules.get(schedule)
    stages = family.placed(ranks, None if stages == "auto" else stages)[1]
    found = find_layers(module, layers)
    counts = divide(module, found, stages, balance)
    order = family.build(ranks=ranks, micro_batches=micro_batch_count(batch, ranks, micro_batches), stages=stages)
    number, bubble = _predicted(family, order)
    topology = Topology.for_schedule(ranks, loss_rank=order.placement[0, stages - 1])
    described, names = [], iter(name for name, _ in found)
    for stage, (count, held) in enumerate(zip(counts, held_by_stages(module, found, counts), strict=True)):
        holders = {topology.process(0, rank) for (_, place), rank in order.placement.items() if place == stage}
        size = sum(one.size for one in held)
        trained = sum(one.size for one in held if one.parameter.requires_grad)
        described.append(
            StagePlan(
                stage=stage,
                ranks=tuple(sorted(holders)),
                layers=tuple(next(names) for _ in range(count)),
                parameters=size,
                trainable=trained,
                bytes=BYTES_PER_NUMBER * (size + STATES * trained),
            )
        )
    total = sum(parameter.numel() for parameter in module.parameters())
    return Plan(
        type(module).__name__,
        tuple(described),
        Layout(ranks, 1, stages),
        family.label,
        BatchEquation(batch, number, 1, accumulation),
        bubble,
        notes=(f"{total:,} parameters; memory is that of weights, gradients and two optimizer moments in 32 bits",),
    )


def _predicted(family: Family, schedule: Schedule) -> tuple[int, float]:
    """Micro-batches of a batch, and the bubble ratio: without a flush, that of the steady state."""
    if schedule.synchronous:
        return schedule.micro_batches, float(simulate(schedule, Costs()).bubble_ratio)
    flow = schedules.stream(family, schedule.ranks, schedule.stages)
    batches = 20 * flow.period + 2 * schedule.ranks
    endless = family.build(schedule.ranks, batches * flow.micro_batches, stages=schedule.stages)
    return flow.micro_batches, float(simulate(endless, Costs()).steady_bubble_ratio)
