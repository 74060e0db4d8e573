"""What a plan and a search are made for: each option once, for Python and for the command line."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from lightning_pipe.config import Auto, Balance, RankOrder, Sharding, layout
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.planning.cost_profile import CostProfile
from lightning_pipe.schedules import Family, Schedule
from lightning_pipe.schedules.passes.recompute import Mode as Recompute
from lightning_pipe.text import number_of_bytes
from lightning_pipe.transport.topology import Topology

Given = ParamSpec("Given")
Subject = TypeVar("Subject")
Options = TypeVar("Options")
Result = TypeVar("Result")


def taking(
    options: Callable[Given, Options],
) -> Callable[[Callable[[Subject, Options], Result]], Callable[Concatenate[Subject, Given], Result]]:
    """Let a function of something and options take the options one by one.

    Args:
        options: their dataclass, whose docstring has what they mean.
    """

    def change(function: Callable[[Subject, Options], Result]) -> Callable[Concatenate[Subject, Given], Result]:
        @functools.wraps(function)
        def call(subject: Subject, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
            return function(subject, options(*args, **kwargs))

        first = next(iter(inspect.signature(function).parameters.values()))
        one_by_one: Any = [first, *inspect.signature(options).parameters.values()]
        call.__signature__ = inspect.signature(function).replace(parameters=one_by_one)  # type: ignore[attr-defined]
        return call

    return change


@dataclass(frozen=True)
class PlanOptions:
    """What is planned.

    Args:
        ranks: in the pipeline.
        batch: samples in a batch.
        schedule: as for `PipeStrategy`.
        stages: the module is cut into.
        micro_batches: a batch is cut into.
        layers: dotted name of the layer sequence, or several.
        balance: what the stages are to have the same of, or the number of layers of every stage.
        accumulation: batches in an optimizer step.
        recompute: when forward passes run again instead of keeping activations.
        profile: measured costs of the layers, or their file: then memory counts activations, and the bubble is that of
            these stages.
        accelerator: where it will run: a GPU has memory of its own.
        replicas: pipelines side by side.
        nodes: on which the processes are, equally many on each.
        rank_order: whose ranks share a node: those of a pipeline, or those that hold the same stages.
        passes: of a training step over the layers.
        shard_optimizer: whether holders of a parameter divide its optimizer state; "gradients": its gradients, too;
            "parameters": also its values, between batches.
        tensor_parallel_size: processes that compute a layer together.

    Raises:
        ConfigurationError: there is no rank, no sample, no pass, or a profile with several passes.
    """

    ranks: int
    batch: int
    schedule: str | Family | Schedule = "1f1b"
    stages: int | Auto = "auto"
    micro_batches: int | Auto = "auto"
    layers: str | Sequence[str] | None = None
    balance: Balance = "parameters"
    accumulation: int = 1
    recompute: Recompute = "never"
    profile: CostProfile | str | os.PathLike[str] | None = None
    accelerator: Literal["cpu", "gpu"] = "gpu"
    replicas: int = 1
    nodes: int = 1
    rank_order: RankOrder = "pipeline"
    passes: int = 1
    shard_optimizer: Sharding = False
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        for name in ("ranks", "batch", "accumulation", "replicas", "nodes", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"A plan needs {name} of 1 or more, not {name}={getattr(self, name)}.")
        if self.passes < 1 or (self.passes > 1 and self.profile is not None):
            raise ConfigurationError(
                f"passes={self.passes} cannot be planned" + (" with a profile." if self.profile else "."),
                hint="Leave out the profile, which knows the times of one pass." if self.profile else "Use 1 or more.",
            )

    @functools.cached_property
    def costs(self) -> CostProfile | None:
        """The measured costs."""
        given = self.profile
        return given if given is None or isinstance(given, CostProfile) else CostProfile.load(given)

    def topology(self, loss_rank: int) -> Topology:
        """Which process is which rank, with equally many processes on each node.

        Args:
            loss_rank: the rank with the last stage.

        Raises:
            ConfigurationError: the processes cannot be divided over the nodes.
        """
        processes = self.ranks * self.replicas * self.tensor_parallel_size
        tensor = f" x {self.tensor_parallel_size} tensor ranks" * (self.tensor_parallel_size > 1)
        if self.nodes < 1 or processes % self.nodes:
            raise ConfigurationError(
                f"{self.ranks} ranks x {self.replicas} replicas{tensor} = {processes} processes cannot be divided over "
                f"{self.nodes} nodes.",
                hint="Lightning starts equally many processes on every node.",
            )
        node_size = processes // self.nodes
        return Topology(self.ranks, self.replicas, loss_rank, self.rank_order, node_size, self.tensor_parallel_size)


@dataclass(frozen=True)
class SearchOptions:
    """What is searched.

    Args:
        ranks: processes, over all pipelines.
        global_batch: samples of an optimizer step.
        memory: bytes that each process may hold, such as 16e9 or "16GiB"; by default any.
        families: schedules, by name or as objects; by default all with a flush, with their variants.
        pipeline_parallel_size: ranks of a pipeline; by default all divisors of ``ranks``.
        stages_per_rank: how many stages a schedule may put on a rank that takes any number.
        micro_batches: how many a batch may be cut into; by default all divisors.
        layers: dotted names of the layer sequence of a module.
        shown: how many of the best are wanted.
        tensor_parallel_size: processes that compute a layer together, in every configuration.

    Raises:
        ConfigurationError: a number is not 1 or more.
    """

    ranks: int
    global_batch: int
    memory: float | str | None = None
    families: Sequence[str | Family] | None = None
    pipeline_parallel_size: int | None = None
    stages_per_rank: Sequence[int] = (1, 2)
    micro_batches: Sequence[int] | None = None
    layers: str | Sequence[str] | None = None
    shown: int = 10
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        numbers = {
            "ranks": [self.ranks],
            "global_batch": [self.global_batch],
            "pipeline_parallel_size": [self.pipeline_parallel_size] if self.pipeline_parallel_size is not None else [],
            "tensor_parallel_size": [self.tensor_parallel_size],
            "stages_per_rank": self.stages_per_rank,
            "micro_batches": self.micro_batches or [],
            "shown": [self.shown],
        }
        for name, values in numbers.items():
            for value in values:
                if not isinstance(value, int) or value < 1:
                    raise ConfigurationError(f"A search needs {name} of 1 or more, not {value!r}.")

    @property
    def processes(self) -> int:
        """Those of all pipelines: each is one of the tensor ranks that compute layers together."""
        return layout(self.ranks, tensor_parallel_size=self.tensor_parallel_size).pipeline_parallel_size

    @property
    def limit(self) -> float:
        """Bytes that each process may hold; infinite: any."""
        if self.memory is None:
            return math.inf
        return number_of_bytes(self.memory) if isinstance(self.memory, str) else self.memory
