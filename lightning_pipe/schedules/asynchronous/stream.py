"""An asynchronous schedule as an endless stream: what every rank runs when the batches come one per call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules.asynchronous.calls import Call, Cut, covers
from lightning_pipe.schedules.family import Family
from lightning_pipe.schedules.passes.recompute import Mode, with_recompute

_LONGEST = 1 << 15
"""Micro-batches up to which a schedule is looked at for its steps and its period."""


@dataclass(frozen=True)
class Stream:
    """An asynchronous schedule, cut into calls that repeat.

    Call ``k`` brings batch ``k``. An action runs in the first call that its rank's order, its input and the version of
    the weights that it needs allow, where a value takes the time of one micro-batch to the rank of the next stage, and
    a gradient none to that of the previous one. So at the beginning of a call every rank has work whose input has
    come in an earlier call; although each call begins with a message from the rank with the loss, no rank waits in the
    steady state. The optimizer steps at the end of calls, at most once in each.

    With ``n`` stages PipeDream runs, on stage ``s`` in call ``k``, the forward of batch ``k - s``, the backward of
    batch ``k - (n - 1)``, and its step.

    Args:
        micro_batches: micro-batches of a batch.
        period: batches after which calls repeat.
        lag: calls after its own in which a batch is not done yet, at most.
        calls: for every rank the calls up to the end of the first period that repeats for ever.
        steps: for every rank its optimizer steps in a period.
        versions: ``(rank, micro_batch)`` -> steps that the weights have seen on which it runs, as far as ``calls`` go
            at least.
        weight_versions: for every rank the most versions that it holds at once.
    """

    micro_batches: int
    period: int
    lag: int
    calls: tuple[tuple[Call, ...], ...]
    steps: tuple[int, ...]
    versions: Mapping[tuple[int, int], int]
    weight_versions: tuple[int, ...]

    def call(self, rank: int, number: int) -> Call:
        """What a rank does in a call."""
        rounds = self._rounds(number)
        batches = rounds * self.period
        return self.calls[rank][number - batches].shifted(
            batches, batches * self.micro_batches, rounds * self.steps[rank]
        )

    def version(self, rank: int, micro_batch: int) -> int:
        """How many steps the weights have seen on which a rank runs a micro-batch."""
        rounds = self._rounds(micro_batch // self.micro_batches)
        early = micro_batch - rounds * self.period * self.micro_batches
        return self.versions[rank, early] + rounds * self.steps[rank]

    def _rounds(self, number: int) -> int:
        """How many periods a call or batch lies behind those that are written down."""
        return max(0, -(-(number + 1 - len(self.calls[0])) // self.period))

    @property
    def first_update(self) -> int:
        """The first call at whose end a rank steps; some rank of each stage has run it forward by then."""
        return min(number for calls in self.calls for number, call in enumerate(calls) if call.update)

    def updates(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The batches of each call's step: ranks that share parameters must have the same."""
        return tuple(call.update for call in self.calls[rank])


def stream(
    family: Family,
    ranks: int,
    stages: int | None = None,
    *,
    skips: Iterable[tuple[int, int]] = (),
    recompute: Mode = "never",
) -> Stream:
    """Cut the schedules of an asynchronous family into calls.

    Args:
        family: builds the schedules.
        ranks: ranks in one pipeline.
        stages: stages of the model.
        skips: pairs of stages that send to each other past those between; see `lower`.
        recompute: see `with_recompute`.

    Raises:
        ScheduleError: the family flushes, or its order does not repeat, or its steps do not fit between calls.

    Example:
        >>> from lightning_pipe.schedules import PipeDream
        >>> pipedream = stream(PipeDream(), ranks=2)
        >>> [" ".join(map(str, pipedream.call(rank, 100).actions)) for rank in range(2)]
        ['0RECV_B99<1 0F100 0SEND_F100>1 0B99', '1RECV_F99<0 1F99 1B99 1SEND_B99>0']
        >>> pipedream.call(0, 100).update, pipedream.version(0, 100), pipedream.version(1, 100)
        ((99,), 99, 100)
    """
    skips = list(skips)
    size, period = _batch_and_period(family, ranks, stages)
    batches = 6 * period + 2 * (ranks + (stages or ranks)) + 4
    while batches * size <= _LONGEST:
        schedule = with_recompute(family.build(ranks, batches * size, stages=stages), recompute)
        cut = Cut(schedule, size, skips)
        # towards the end the calls miss what batches to come would bring
        known = max(0, batches - cut.lag - period)
        calls = [cut.calls(rank, known) for rank in range(ranks)]
        start = _repeat_from(calls, cut.versions, size, period)
        if known - start >= 3 * period:
            steps = tuple(sum(bool(call.update) for call in own[start : start + period]) for own in calls)
            kept = tuple(tuple(own[: start + period]) for own in calls)
            return Stream(size, period, cut.lag, kept, steps, cut.versions, schedule.weight_versions)
        batches *= 2
    raise ScheduleError(
        f"Schedule {family.name!r} does not repeat itself on {ranks} ranks, so it cannot go on over batches.",
        hint="Order the micro-batches of all batches alike.",
    )


def _batch_and_period(family: Family, ranks: int, stages: int | None) -> tuple[int, int]:
    """Micro-batches of a batch, and batches after which all pipes have been used and all stages have stepped."""
    number = 4 * ranks * max(1, family.pipes)
    while number <= _LONGEST:
        schedule = family.build(ranks, number, stages=stages)
        if schedule.synchronous:
            raise ScheduleError(
                f"Schedule {family.name!r} flushes the pipeline at the end of every batch; nothing stays in flight.",
                hint="Use an asynchronous schedule, such as PipeDream.",
            )
        taken = [covers(schedule, stage) for stage in range(schedule.stages)]
        if all(len(steps) >= 4 for steps in taken):
            sizes = {len(step) for steps in taken for step in steps[:-1]}
            size = math.gcd(*sizes)
            return size, math.lcm(schedule.pipes, *sizes) // size
        number *= 2
    raise ScheduleError(f"Schedule {family.name!r} does not step on every stage.")


def _repeat_from(
    calls: Sequence[Sequence[Call]], versions: Mapping[tuple[int, int], int], size: int, period: int
) -> int:
    """The first call from which on all ranks repeat themselves, as far as is known."""
    start, length = 0, period * size
    for rank, own in enumerate(calls):
        steps = sum(bool(call.update) for call in own[-period:])
        for number, later in enumerate(own[period:]):
            batch = [index for index in range(number * size, (number + 1) * size) if (rank, index) in versions]
            if own[number].shifted(period, length, steps) != later or any(
                versions[rank, index] + steps != versions[rank, index + length] for index in batch
            ):
                start = max(start, number + 1)
    return start
