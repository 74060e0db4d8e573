"""Plans how a module would be cut, without starting processes and without reading a weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate

from torch import nn

from lightning_pipe import schedules
from lightning_pipe.config import BatchEquation, RunLayout, Sharding, micro_batch_count
from lightning_pipe.partition import AUTO, ParameterPlace, divide, places_by_stage
from lightning_pipe.partition.choice import layers_before_run
from lightning_pipe.planning.batch_norms import BATCH_NORM_SAMPLES, is_normalising, norms_note
from lightning_pipe.planning.layer_sizes import of_module, without_times
from lightning_pipe.planning.memory import process_memories, sharding_notes, training_factor
from lightning_pipe.planning.options import PlanOptions, taking
from lightning_pipe.planning.prediction import rank_bytes, stage_costs, stage_memory
from lightning_pipe.planning.render import Plan, StagePlan
from lightning_pipe.planning.traffic import NodeTraffic, divided_sums, gradient_bytes, messages_of, node_traffic, scaled
from lightning_pipe.schedules import Family, Schedule, Stream, with_recompute
from lightning_pipe.schedules.action import Placement
from lightning_pipe.schedules.several_passes import several_passes
from lightning_pipe.simulate import Costs, Memory, memory_over_time, peak, simulate
from lightning_pipe.transport.topology import Topology

BYTES_PER_NUMBER = 4


@taking(PlanOptions)
def plan(module: nn.Module, asked: PlanOptions) -> Plan:
    """The plan of pipelines: which stage holds which layers, on which rank, with how much memory and idle time.

    No process is started and no value of a parameter is read, so a model of any size can be planned on any machine.
    ``plan(module, ranks=4, batch=32, …)`` takes the options of `PlanOptions`.

    Args:
        module: mostly a LightningModule; its parameters may be without values (on the meta device).
        asked: the options.

    Returns:
        The plan. ``print`` shows what a run prints before its first batch; ``plan.stages`` has for every stage its
        ranks, layers, number of parameters and predicted bytes; ``plan.bubble`` is a share of the ranks' time.

    Raises:
        PipeError: the module cannot be cut like this.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        >>> [stage.layers for stage in plan(module, ranks=2, batch=16).stages]
        [('0', '1'), ('2', '3')]
        >>> print(plan(module, ranks=2, batch=16, schedule="gpipe"))  # doctest: +ELLIPSIS
        Pipeline of Sequential
        ...
        Schedule  gpipe, predicted bubble 11.1 %
        ...
    """
    ranks, balance = asked.ranks, asked.balance
    family = schedules.get(asked.schedule)
    stages = family.placed(ranks, None if asked.stages == "auto" else asked.stages)[1]
    found = layers_before_run(module, asked.layers, stages)
    chosen = asked.micro_batches == "auto"
    least = BATCH_NORM_SAMPLES if chosen and any(map(is_normalising, module.modules())) else 1
    count = micro_batch_count(asked.batch, ranks, asked.micro_batches, least)
    profile, measured = None if asked.costs is None else of_module(asked.costs, without_times(module, found)), None
    if profile is not None and (balance == "time" or balance == "memory"):
        measured = profile.layer_costs(balance, stages, recompute=asked.recompute != "never")
    counts = divide(module, found, stages, balance, measured)

    @cache
    def build(number: int) -> Schedule:
        one = family.build(ranks, number, stages=stages)
        return with_recompute(several_passes(one, asked.passes), asked.recompute)

    order = build(count)
    stream = None if order.synchronous else schedules.stream(family, ranks, stages)
    number = order.micro_batches if stream is None else stream.micro_batches
    costs, memory, known = None, None, "that of weights, gradients and two optimizer moments in 32 bits"
    samples, at = -(-asked.batch // count), None
    if profile is not None:
        at = profile.at(samples)
        copies = [asked.replicas * len(order.holders(stage)) for stage in range(stages)]
        costs = stage_costs(profile, counts, samples, copies, asked.shard_optimizer)
        memory = stage_memory(profile, counts, samples, copies, asked.shard_optimizer)
        known = "the most that is held: weights, gradients, two optimizer moments, and activations"
    idle = partial(predicted_bubble, build, stream=stream, costs=costs)
    of_norms = norms_note(module, asked.equation(number).sizes, ranks, idle, chosen and stream is None)
    placement = {place: rank for place, rank in order.placement.items() if place[1] < stages}  # of one pass
    topology = asked.topology(placement[0, stages - 1])
    names = iter(name for name, _ in found)
    named = [tuple(next(names) for _ in range(count)) for count in counts]
    held = places_by_stage(module, found, counts)
    total = sum(parameter.numel() for parameter in module.parameters())
    by = (f"balanced by {balance}",) if isinstance(balance, str) and balance not in (AUTO, "parameters") else ()
    made = assembled(
        type(module).__name__,
        named,
        held,
        placement,
        topology,
        label_of(family, asked.passes),
        asked.equation(number),
        order,
        sharding=asked.shard_optimizer,
        on_device=asked.accelerator == "gpu",
        number_bytes=BYTES_PER_NUMBER,
        sent_bytes=BYTES_PER_NUMBER,
        message_bytes=None if at is None else [at.boundary_bytes[end - 1] for end in accumulate(counts)],
    )
    notes = (f"{total:,} parameters; memory is {known}", *by, *made.notes, *of_norms)
    made = replace(made, bubble=idle(number), notes=notes)
    if memory is None:
        return made
    held_by = rank_bytes(order, memory)  # its stages do not hold most at the same time
    of_ranks = (replace(one, step=round(held_by[topology.locate(one.process)[1]])) for one in made.memory)
    return replace(made, stages=with_activations(made.stages, order, memory), memory=tuple(of_ranks))


def assembled(
    model: str,
    names: Sequence[tuple[str, ...]],
    held: Sequence[Sequence[ParameterPlace]],
    placement: Placement,
    topology: Topology,
    label: str,
    batch: BatchEquation | None,
    schedule: Schedule | None,
    *,
    sharding: Sharding,
    on_device: bool,
    number_bytes: int | None = None,
    sent_bytes: int | None = None,
    message_bytes: Sequence[float] | None = None,
    built: int = 0,
) -> Plan:
    """The plan of stages that are known, without the bubble.

    The order in which modules are registered decides on which stages it puts parameters outside the layers. The memory
    is that of weights, gradients and two optimizer moments.

    Args:
        model: name of the module's class.
        names: for every stage the dotted names of its layers.
        held: for every stage the parameters that it holds.
        placement: which rank computes a stage.
        topology: which process is which rank.
        label: the schedule in words.
        batch: of the first batch; ``None``: its size is not known.
        schedule: of that batch.
        sharding: what the holders of a parameter divide.
        on_device: whether devices have memory of their own.
        number_bytes: bytes of a number; ``None``: as in each parameter.
        sent_bytes: the same in sums of gradients.
        message_bytes: for every stage what it hands to the next, where that is known.
        built: bytes that every process has built whole.
    """
    accumulation = 1 if batch is None else batch.accumulation
    seen: dict[str, list[int]] = {}
    for stage, own in enumerate(held):
        for one in own:
            seen.setdefault(one.name, []).append(stage)
    traffic: tuple[NodeTraffic, ...] = ()
    if schedule is not None:
        sent, values = (gradient_bytes(held, placement, size) for size in (sent_bytes, number_bytes))
        traffic = node_traffic(
            topology,
            scaled(messages_of(schedule), accumulation),
            divided_sums(sent, values, sharding, accumulation),
            None if message_bytes is None else scaled(messages_of(schedule, message_bytes), accumulation),
            shared=bool(sharding),
        )
    return Plan(
        model,
        stage_plans(names, held, placement, topology, number_bytes, sharding),
        RunLayout(topology.ranks, topology.replicas, len(held)),
        label,
        batch,
        ties=tuple((name, tuple(stages)) for name, stages in seen.items() if len(stages) > 1),
        notes=sharding_notes(sharding),
        memory=process_memories(
            held,
            placement,
            topology,
            number_bytes=number_bytes,
            built=built,
            on_device=on_device,
            sharding=sharding,
            accumulated=accumulation > 1,
        ),
        topology=topology,
        traffic=traffic,
    )


def label_of(family: Family, passes: int) -> str:
    """The schedule of a plan in words."""
    return family.label if passes == 1 else f"{family.label} in {passes} passes"


def stage_plans(
    names: Sequence[tuple[str, ...]],
    held: Sequence[Sequence[ParameterPlace]],
    placement: Placement,
    topology: Topology,
    number_bytes: int | None = None,
    sharding: Sharding = False,
) -> tuple[StagePlan, ...]:
    """What every stage has.

    Args:
        names: for every stage the dotted names of its layers.
        held: for every stage the parameters that it holds.
        placement: which rank computes a stage.
        topology: which process is which rank.
        number_bytes: bytes of a number; ``None``: as in each parameter.
        sharding: what the holders of a parameter divide.
    """
    plans = []
    for stage, (layers, own) in enumerate(zip(names, held, strict=True)):
        ranks = {rank for (_, place), rank in placement.items() if place == stage}
        processes = sorted(topology.process(replica, rank) for replica in range(topology.replicas) for rank in ranks)
        trained = [one for one in own if one.parameter.requires_grad]
        weights, training = (
            sum(one.size * (number_bytes or one.parameter.element_size()) for one in some) for some in (own, trained)
        )
        plans.append(
            StagePlan(
                stage,
                tuple(processes),
                layers,
                sum(one.size for one in own),
                sum(one.size for one in trained),
                int(weights + training_factor(len(processes), sharding) * training),
            )
        )
    return tuple(plans)


def with_activations(plans: Sequence[StagePlan], schedule: Schedule, memory: Memory) -> tuple[StagePlan, ...]:
    """The stages with the most activations that a rank holds for each of them, over all ranks that hold it."""
    found = []
    for plan in plans:
        here = [int(stage == plan.stage) for stage in range(schedule.stages)]
        own = memory.at(plan.stage)
        alone = Memory(
            activations=[own.activations * each for each in here], inputs=[own.inputs * each for each in here]
        )
        held = max(peak(points).activations for points in memory_over_time(schedule, alone))
        found.append(replace(plan, bytes=plan.bytes + round(held)))
    return tuple(found)


def predicted_bubble(
    build: Callable[[int], Schedule], micro_batches: int, stream: Stream | None, costs: Costs | None = None
) -> float:
    """The bubble ratio; without a flush that of the steady state.

    Args:
        build: makes the schedule for a number of micro-batches.
        micro_batches: of one batch.
        stream: the calls of a schedule without a flush.
        costs: times of the stages; without them all stages are taken for equal. Steps and reductions are no part.
    """
    costs = Costs() if costs is None else replace(costs, reduce=0, step=0)
    if stream is None:
        return float(simulate(build(micro_batches), costs).bubble_ratio)
    batches = 20 * stream.period + 2 * len(stream.calls)
    return float(simulate(build(batches * stream.micro_batches), costs).steady_bubble_ratio)
