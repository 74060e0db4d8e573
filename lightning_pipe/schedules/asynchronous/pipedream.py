"""PipeDream and PipeDream-2BW: asynchronous schedules without a flush."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain
from math import lcm
from typing import ClassVar

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.action import Action, Kind
from lightning_pipe.schedules.families.one_f_one_b import OneFOneB, alternate
from lightning_pipe.schedules.family import Family, Orders, check_counts
from lightning_pipe.schedules.ir import Schedule


@dataclass(frozen=True)
class PipeDream(Family):
    """PipeDream (Narayanan et al. 2019): 1F1B without a flush, and a step after every backward pass.

    The micro-batches of this schedule are the paper's minibatches, each a batch of its own. With ``n`` stages, stage
    ``s`` runs minibatch ``t`` on weights that have seen ``max(0, t - (n - 1 - s))`` steps, forward and backward, so it
    keeps up to ``n - s`` versions; with vertical sync all stages use ``max(0, t - (n - 1))``. No bubble in the steady
    state, as long as stages are replicated as their costs ask for. An exception is a stage with more replicas than
    those around it, such as ``[1, 2, 1]``: the paper's number of minibatches in flight, the ranks divided by the
    replicas of the first stage and rounded up, leaves a third of the time idle there.

    Args:
        vertical_sync: use the same version of the weights on all stages.
        replicas: ranks for every stage (1F1B-RR): minibatches take the replicas of a stage in turn, which step
            together; by default one for every stage.

    Raises:
        ScheduleError: a stage has no replica.

    Example:
        >>> from lightning_pipe import simulate
        >>> schedule = PipeDream().build(ranks=4, micro_batches=64)
        >>> simulate(schedule).steady_bubble_ratio, schedule.weight_versions
        (Fraction(0, 1), (4, 3, 2, 1))
    """

    name: ClassVar[str] = "pipedream"
    synchronous: ClassVar[bool] = False

    vertical_sync: bool = False
    replicas: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.replicas is not None:
            # Configuration files have lists.
            object.__setattr__(self, "replicas", tuple(self.replicas))
            counts = {f"replicas[{stage}]": count for stage, count in enumerate(self.replicas or (0,))}
            check_counts("PipeDream", **counts)

    @property
    def pipes(self) -> int:
        """One for every route through the replicas."""
        return lcm(*self.replicas or (1,))

    def placed(self, ranks: int, stages: int | None) -> tuple[Family, int]:
        """With replicas there are as many stages as they say, on as many ranks as they sum to."""
        if self.replicas is None:
            return super().placed(ranks, stages)
        if ranks != sum(self.replicas):
            raise ScheduleError(
                f"PipeDream with replicas={list(self.replicas)} needs {sum(self.replicas)} ranks, got ranks={ranks}."
            )
        if stages is not None and stages < len(self.replicas):
            raise ScheduleError(
                f"PipeDream with replicas={list(self.replicas)} has {len(self.replicas)} stages, got stages={stages}."
            )
        return self, len(self.replicas)

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """Each rank warms up with as many forwards as keep the later ranks busy, then alternates."""
        replicas = self.replicas or (1,) * ranks
        return [
            self._order(stage, replica, copies, later=ranks - end, micro_batches=micro_batches)
            for stage, (copies, end) in enumerate(zip(replicas, accumulate(replicas), strict=True))
            for replica in range(copies)
        ]

    def _order(self, stage: int, replica: int, copies: int, later: int, micro_batches: int) -> list[Action]:
        forwards, backwards = [], []
        for first in range(0, micro_batches, copies):
            index = first + replica
            # A replica that gets no minibatch in the last round steps with the others all the same.
            step = [Action(Kind.STEP, stage, first, index % self.pipes)]
            if index < micro_batches:
                forwards.append([Action(Kind.FORWARD, stage, index, index % self.pipes)])
                step = [Action(Kind.BACKWARD, stage, index, index % self.pipes), *step]
            backwards.append(step)
        return [*chain.from_iterable(alternate(forwards, backwards, warm_up=-(-later // copies)))]

    def versions(self, schedule: Schedule) -> Mapping[tuple[int, int], int]:
        """Each stage's newest or, with vertical sync, the number that is newest on the first stage."""
        newest = schedule.versions
        if not self.vertical_sync:
            return newest
        return {(stage, micro_batch): newest[0, micro_batch] for stage, micro_batch in newest}


@dataclass(frozen=True)
class PipeDream2BW(Family):
    """PipeDream-2BW (Narayanan et al. 2021): 1F1B without a flush, a step after several micro-batches, two versions.

    A batch ``b`` of ``accumulate`` micro-batches is computed, forward and backward, on the weights after
    ``max(b - 1, 0)`` steps: W(t+1) = W(t) - lr grad(W(t-1)). So a rank never holds more than two versions. The
    micro-batches of this schedule are those of all batches, one after the other. No bubble in the steady state.

    Args:
        accumulate: micro-batches in a batch; by default, and in the paper at least, as many as ranks.

    Raises:
        ScheduleError: ``accumulate`` is below one.

    Example:
        >>> from lightning_pipe import simulate
        >>> schedule = PipeDream2BW(accumulate=4).build(ranks=4, micro_batches=64)
        >>> simulate(schedule).steady_bubble_ratio, schedule.weight_versions
        (Fraction(0, 1), (2, 2, 2, 2))
    """

    name: ClassVar[str] = "pipedream_2bw"
    synchronous: ClassVar[bool] = False

    accumulate: int | None = None

    def __post_init__(self) -> None:
        if self.accumulate is not None:
            check_counts("PipeDream2BW", accumulate=self.accumulate)

    def placed(self, ranks: int, stages: int | None) -> tuple[Family, int]:
        """With the number of micro-batches in a batch."""
        if self.accumulate is None:
            return PipeDream2BW(ranks).placed(ranks, stages)
        if self.accumulate < ranks:
            raise ScheduleError(
                f"PipeDream2BW needs at least as many micro-batches in a batch as ranks, so that two versions of the "
                f"weights suffice, got accumulate={self.accumulate} and ranks={ranks}.",
                hint=f"Use accumulate={ranks} or more.",
            )
        return super().placed(ranks, stages)

    def for_batches_of(self, micro_batches: int) -> Family:
        """With this number, unless another was given."""
        return PipeDream2BW(micro_batches) if self.accumulate is None else self

    def orders(self, ranks: int, micro_batches: int) -> Orders:
        """1F1B, with a step behind the last backward pass of every batch."""
        size = self.accumulate or ranks
        first_of = {min(first + size, micro_batches) - 1: first for first in range(0, micro_batches, size)}

        def stepping(order: Iterable[Action]) -> Iterator[Action]:
            for action in order:
                yield action
                if action.kind is Kind.BACKWARD and action.micro_batch in first_of:
                    yield Action(Kind.STEP, action.stage, first_of[action.micro_batch])

        return [list(stepping(order)) for order in OneFOneB().orders(ranks, micro_batches)]

    def versions(self, schedule: Schedule) -> Mapping[tuple[int, int], int]:
        """One step behind the batch."""
        size = self.accumulate or schedule.ranks
        return {
            (stage, micro_batch): max(micro_batch // size - 1, 0)
            for stage in range(schedule.stages)
            for micro_batch in range(schedule.micro_batches)
        }
