"""Plans how a module would be cut, without starting processes and without reading a weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, pairwise

from torch import nn

from lightning_pipe import schedules
from lightning_pipe.config import BatchEquation, RunLayout, micro_batch_count
from lightning_pipe.partition import AUTO, Layers, divide, find_layers, places_by_stage
from lightning_pipe.planning.batch_norms import BATCH_NORM_SAMPLES, is_normalising, norms_note
from lightning_pipe.planning.division import Division
from lightning_pipe.planning.layer_sizes import of_process
from lightning_pipe.planning.memory import HeldParameters
from lightning_pipe.planning.options import PlanOptions, taking
from lightning_pipe.planning.prediction import rank_bytes, stage_costs, stage_memory
from lightning_pipe.planning.render import Plan, StagePlan
from lightning_pipe.schedules import Family, Schedule, with_recompute
from lightning_pipe.schedules.action import Placement
from lightning_pipe.schedules.several_passes import several_passes
from lightning_pipe.sharding.refusals import check_family, in_parts
from lightning_pipe.simulate import Costs, Memory, memory_over_time, peak
from lightning_pipe.simulate.simulator import simulate_batch
from lightning_pipe.transport.arrangement import arrange
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
    stages = arrange(family, ranks, stages=asked.stages).stages
    if in_parts(asked.shard_optimizer, asked.tensor_parallel_size):
        check_family(family)
    layers = find_layers(module, asked.layers, stages)
    division = Division.before_run(module, layers, asked.shard_optimizer, asked.tensor_parallel_size)
    chosen = asked.micro_batches == "auto"
    least = BATCH_NORM_SAMPLES if chosen and any(map(is_normalising, module.modules())) else 1
    count = micro_batch_count(asked.batch, ranks, asked.micro_batches, least)
    profile, measured = None, None
    if asked.costs is not None:
        profile = of_process(module, layers, asked.shard_optimizer, asked.tensor_parallel_size, asked.costs)
    if profile is not None and (balance == "time" or balance == "memory"):
        measured = profile.layer_costs(balance, stages, recompute=asked.recompute != "never")
    counts = divide(module, layers, stages, balance, measured)

    @cache
    def build(number: int) -> Schedule:
        one = family.build(ranks, number, stages=stages)
        return with_recompute(several_passes(one, asked.passes), asked.recompute)

    order = build(count)
    stream = None if order.synchronous else schedules.stream(family, ranks, stages)
    number = order.micro_batches if stream is None else stream.micro_batches
    equation = BatchEquation(asked.batch, number, asked.replicas, asked.accumulation)
    costs, memory, known = None, None, "that of weights, gradients and two optimizer moments in 32 bits"
    if profile is not None:
        holders = [frozenset(order.holders(stage)) for stage in range(stages)]
        copies = [asked.replicas * len(each) for each in holders]
        given = (profile, counts, -(-asked.batch // count), copies, asked.shard_optimizer)
        costs, memory = stage_costs(*given), stage_memory(*given, holders)
        known = "the most that is held: weights, gradients, two optimizer moments, and activations"
    placement = {place: rank for place, rank in order.placement.items() if place[1] < stages}  # of one pass
    topology = asked.topology(placement[0, stages - 1])
    made = assembled(
        module,
        layers,
        counts,
        placement,
        topology,
        label_of(family, asked.passes),
        equation,
        division=replace(division, number_bytes=BYTES_PER_NUMBER),
        on_device=asked.accelerator == "gpu",
    )
    if memory is not None:
        made = with_activations(made, topology, order, memory)
    idle = partial(predicted_bubble, build, costs=costs)
    total = sum(parameter.numel() for parameter in module.parameters())
    by = (f"balanced by {balance}",) if isinstance(balance, str) and balance not in (AUTO, "parameters") else ()
    of_norms = norms_note(module, equation.sizes, ranks, idle, chosen and stream is None)
    notes = (f"{total:,} parameters; memory is {known}", *by, *made.notes, *of_norms)
    return replace(made, bubble=idle(equation.micro_batches), notes=notes)


def assembled(
    module: nn.Module,
    layers: Layers,
    counts: Sequence[int],
    placement: Placement,
    topology: Topology,
    label: str,
    batch: BatchEquation | None,
    *,
    division: Division,
    on_device: bool,
    built: int = 0,
) -> Plan:
    """The plan of stages that are known, without the bubble.

    The order in which modules are registered decides on which stages it puts parameters outside the layers. The memory
    is that of weights, gradients and two optimizer moments.

    Args:
        module: the whole module.
        layers: its layers.
        counts: layers of every stage.
        placement: which rank computes a stage.
        topology: which process is which rank.
        label: the schedule in words.
        batch: of the first batch; ``None``: its size is not known.
        division: what the holders of a parameter divide, and tensor ranks.
        on_device: whether devices have memory of their own.
        built: bytes that every process has built whole.
    """
    accumulation = 1 if batch is None else batch.accumulation
    held = HeldParameters(places_by_stage(module, layers, counts), placement, topology, division, accumulation)
    names, seen, stages = [name for name, _ in layers], dict[str, list[int]](), list[StagePlan]()
    for stage, (start, end) in enumerate(pairwise(accumulate(counts, initial=0))):
        ranks, own = [rank for (_, place), rank in placement.items() if place == stage], held.stages[stage]
        processes = sorted(process for each in topology.tensor_slices for process in each.holders(ranks))
        trained = sum(one.size for one in own if one.parameter.requires_grad)
        parameters, size = sum(one.size for one in own), int(held.step(own).total)
        stages.append(StagePlan(stage, tuple(processes), tuple(names[start:end]), parameters, trained, size))
        for one in own:
            seen.setdefault(one.name, []).append(stage)
    return Plan(
        type(module).__name__,
        tuple(stages),
        RunLayout(topology.ranks, topology.replicas, len(counts), topology.tensor),
        label,
        batch,
        ties=tuple((name, tuple(stages)) for name, stages in seen.items() if len(stages) > 1),
        notes=division.notes,
        memory=held.processes(built=built, on_device=on_device),
        topology=topology,
    )


def label_of(family: Family, passes: int) -> str:
    """The schedule of a plan in words."""
    return family.label if passes == 1 else f"{family.label} in {passes} passes"


def with_activations(plan: Plan, topology: Topology, schedule: Schedule, memory: Memory) -> Plan:
    """The plan with the most activations that a rank holds for each stage, over all ranks that hold it.

    A rank's stages do not hold most at the same time: its processes have less than the sum of them.
    """
    stages = []
    for one in plan.stages:
        here = [int(stage == one.stage) for stage in range(schedule.stages)]
        own = memory.at(one.stage)
        alone = Memory(
            activations=[own.activations * each for each in here], inputs=[own.inputs * each for each in here]
        )
        held = max(peak(points).activations for points in memory_over_time(schedule, alone))
        stages.append(replace(one, bytes=one.bytes + round(held)))
    most = list(rank_bytes(schedule, memory))
    processes = [replace(one, step=round(most[topology.locate(one.process)[1]])) for one in plan.memory]
    return replace(plan, stages=tuple(stages), memory=tuple(processes))


def predicted_bubble(build: Callable[[int], Schedule], micro_batches: int, costs: Costs | None = None) -> float:
    """The bubble ratio; without a flush that of the steady state.

    Args:
        build: makes the schedule for a number of micro-batches.
        micro_batches: of one batch.
        costs: times of the stages; without them all stages are taken for equal. Steps and reductions are no part.
    """
    costs = Costs() if costs is None else replace(costs, reduce=0, step=0)
    timeline = simulate_batch(build, micro_batches, costs)
    return float(timeline.bubble_ratio if timeline.steady is None else timeline.steady)
