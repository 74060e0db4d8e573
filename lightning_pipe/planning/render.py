"""The plan printed before the first batch, and the line printed after the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lightning_pipe.config import BatchEquation, RankOrder, RunLayout
from lightning_pipe.planning.memory import ProcessMemory, memory_facts
from lightning_pipe.text import amount, memory, printed, several
from lightning_pipe.transport.topology import Topology


@dataclass(frozen=True)
class StagePlan:
    """One stage.

    Args:
        stage: its number.
        ranks: the processes that hold it, those of all replicas.
        layers: dotted names of its layers.
        parameters: number of parameters held.
        trainable: how many of them are trained.
        bytes: predicted memory for weights, gradients and optimizer state.
    """

    stage: int
    ranks: tuple[int, ...]
    layers: tuple[str, ...]
    parameters: int
    trainable: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """What will run.

    Args:
        model: name of the module's class.
        stages: the stages in order.
        layout: sizes of pipeline and replicas.
        schedule: name and options of the schedule.
        batch: the batch equation of the first batch, if its size is known.
        bubble: predicted bubble ratio, if the schedule is known.
        ties: names of parameters held on several stages, with those stages.
        notes: further lines.
        memory: what each process will need, in the order of their numbers.
        topology: which process is where; ``None``: all are on one node.
    """

    model: str
    stages: tuple[StagePlan, ...]
    layout: RunLayout
    schedule: str
    batch: BatchEquation | None = None
    bubble: float | None = None
    ties: tuple[tuple[str, tuple[int, ...]], ...] = ()
    notes: tuple[str, ...] = field(default=())
    memory: tuple[ProcessMemory, ...] = ()
    topology: Topology | None = None

    def __str__(self) -> str:
        return plan_text(self)


def plan_text(plan: Plan, width: int = 110) -> str:
    """The plan as plain text: a table of the stages with the facts below it.

    Args:
        plan: what will run.
        width: columns of the text.

    Returns:
        Several lines.

    Example:
        >>> stage = StagePlan(0, (0,), ("net.0", "net.1"), 1500, 1500, 24_000)
        >>> print(plan_text(Plan("Lit", (stage,), RunLayout(1, 1, 1), "gpipe", bubble=0.0)))  # doctest: +ELLIPSIS
        Pipeline of Lit
        ...
        │ 0     │ 0     │ net.0 … net.1 (2 layers) │      1.5 k │ 23.4 KiB │
        ...
        Schedule  gpipe, predicted bubble 0.0 %
    """
    table = Table(title=Text(f"Pipeline of {plan.model}", style="bold"), title_justify="left")
    for heading in ("Stage", "Ranks", "Layers"):
        table.add_column(heading, no_wrap=heading != "Layers", overflow="fold")
    for heading in ("Parameters", "Memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in plan.stages:
        parameters = amount(stage.parameters)
        if stage.trainable != stage.parameters:
            parameters += f" ({amount(stage.trainable)} trained)"
        row = (str(stage.stage), numbers(stage.ranks), layer_names(stage.layers), parameters, memory(stage.bytes))
        table.add_row(*map(Text, row))  # as Text, brackets in names are not read as markup
    facts = [Text(f"{name:<9} {value}") for name, value in _facts(plan)]
    return printed(Group(table, *facts), width)


def closing_line(
    batches: int,
    seconds: float,
    samples: int,
    predicted_bubble: float | None,
    measured_bubble: float | None,
) -> str:
    """The line at the end: measured next to predicted.

    Args:
        batches: number of batches trained.
        seconds: time they took.
        samples: samples in them, over all pipelines.
        predicted_bubble: as in the plan.
        measured_bubble: idle share of the ranks' time, if it was measured.

    Returns:
        One line.

    Example:
        >>> closing_line(100, 12.5, 3200, predicted_bubble=0.0588, measured_bubble=0.07123)
        'Pipeline: 100 batches, 256 samples/s; bubble measured 7.1 %, predicted 5.9 %'
    """
    speed = f"{samples / seconds:.3g} samples/s" if seconds > 0 else "no time measured"
    bubbles = [
        f"{name} {100 * value:.1f} %"
        for name, value in (("measured", measured_bubble), ("predicted", predicted_bubble))
        if value is not None
    ]
    return f"Pipeline: {several(batches, 'batch')}, {speed}" + (f"; bubble {', '.join(bubbles)}" if bubbles else "")


def layer_names(layers: Sequence[str]) -> str:
    """The first and the last name and how many there are.

    Example:
        >>> layer_names(["h.0", "h.1", "h.2"]), layer_names(["h.3"])
        ('h.0 … h.2 (3 layers)', 'h.3')
    """
    if len(layers) < 2:
        return "".join(layers)
    return f"{layers[0]} … {layers[-1]} ({several(len(layers), 'layer')})"


def numbers(values: Sequence[int]) -> str:
    """Whole numbers, long lists shortened.

    Example:
        >>> numbers([0, 4]), numbers(range(0, 64, 8))
        ('0, 4', '0, 8, 16, …, 56')
    """
    shown = [str(value) for value in values]
    return ", ".join(shown if len(shown) <= 5 else [*shown[:3], "…", shown[-1]])


_NEIGHBOURS: dict[RankOrder, str] = {
    "pipeline": "the ranks of a pipeline are neighbours, for what stages send each other",
    "replicas": "the holders of a stage are neighbours, for the sums of its gradients",
}


def node_facts(topology: Topology) -> list[tuple[str, str]]:
    """Lines of the plan, where there are several nodes.

    Example:
        >>> for name, line in node_facts(Topology(2, 2, node_size=2)):
        ...     print(f"{name}: {line}")
        Nodes: node 0 has ranks 0, 1; node 1 has ranks 2, 3
        : the ranks of a pipeline are neighbours, for what stages send each other
    """
    nodes = topology.nodes
    if len(nodes) == 1:
        return []
    shown = [f"node {number} has rank{'s' * (len(node) > 1)} {numbers(node)}" for number, node in enumerate(nodes)]
    facts = [("Nodes", "; ".join(shown if len(shown) < 5 else [*shown[:2], "…", shown[-1]]))]
    return facts + [("", _NEIGHBOURS[topology.rank_order])] * (topology.replicas > 1)


def _facts(plan: Plan) -> list[tuple[str, str]]:
    layout = plan.layout
    ranks = several(layout.pipeline_parallel_size, "rank")
    replicas = several(layout.data_parallel_size, "replica")
    bubble = "" if plan.bubble is None else f", predicted bubble {100 * plan.bubble:.1f} %"
    tensor = f" x {layout.tensor_parallel_size} tensor ranks" * (layout.tensor_parallel_size > 1)
    facts = [("Ranks", f"{layout.world_size} = {ranks} in a pipeline x {replicas}{tensor}")]
    if plan.batch is not None:
        facts.append(("Batch", str(plan.batch)))
    facts.append(("Schedule", plan.schedule + bubble))
    facts += [("Tied", f"{name} on stages {numbers(stages)}") for name, stages in plan.ties[:8]]
    if len(plan.ties) > 8:
        facts.append(("", f"and {len(plan.ties) - 8} more parameters on several stages"))
    facts += memory_facts(plan.memory)
    facts += [] if plan.topology is None else node_facts(plan.topology)
    facts += [("Note", line) for line in plan.notes]
    return facts
