"""`lightning_pipe.search`: which configuration is fastest, and why."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import accumulate
from math import inf

from torch import nn

from lightning_pipe import schedules
from lightning_pipe.config import Sharding
from lightning_pipe.errors import ConfigurationError, ScheduleError
from lightning_pipe.partition import find_layers
from lightning_pipe.planning.cost_profile import CostProfile
from lightning_pipe.planning.layer_sizes import of_process
from lightning_pipe.planning.options import SearchOptions, taking
from lightning_pipe.planning.prediction import Configuration, Predictor, divided_share, stage_costs
from lightning_pipe.planning.search_result import SearchResult
from lightning_pipe.schedules import Family
from lightning_pipe.sharding.refusals import check_family, goes
from lightning_pipe.text import memory as amount_of_memory

_UNUSED = ("naive",)
"""Schedules that are there to compare with: never the fastest on more than one rank."""


@taking(SearchOptions)
def search(costs: CostProfile | Predictor | nn.Module, asked: SearchOptions) -> SearchResult:
    """Predict all configurations of a run on so many processes, and rank them.

    Schedule, pipelines side by side, stages, micro-batches, recomputation and the sharding of the optimizer are tried;
    world size and global batch stay as they are. A configuration that does not fit is tried again with a sharded
    optimizer, then with recomputation, then with both. Configurations are simulated in the order of the least time that
    their work takes, until no other can be among the best. ``search(costs, ranks=8, global_batch=256, …)`` takes the
    options of `SearchOptions`.

    Args:
        costs: a profile of the module, measured or made of published figures; or a predictor with rules of its own; or
            the module: its times are then in proportion to its layers' parameters.
        asked: the options.

    Returns:
        The best configurations; ``print`` shows a table, ``best.options`` are the arguments of `PipeStrategy`.

    Raises:
        ConfigurationError: an argument cannot be served, or nothing fits.
        ScheduleError: so many ranks are no pipeline of any of the schedules.

    Example:
        >>> found = search(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), ranks=4, global_batch=32)
        >>> found.best.configuration.replicas * found.best.configuration.ranks
        4
    """
    start = time.perf_counter()
    predictor = costs if isinstance(costs, Predictor) else Predictor(_profile_of(costs, asked))
    candidates = list(_candidates(predictor.profile, asked))
    if not candidates:
        families, size = list(_families(asked)), asked.pipeline_parallel_size or asked.processes
        refused = [each for one in families if isinstance(each := _own_stages(one, size, None), ScheduleError)]
        if families and len(refused) == len(families):
            raise refused[0]
    return _Search(predictor, asked.limit).run(candidates, asked.shown, start)


def _profile_of(costs: CostProfile | nn.Module, asked: SearchOptions) -> CostProfile:
    tensor = asked.tensor_parallel_size
    if isinstance(costs, CostProfile):
        return costs.over_tensor_ranks(tensor)
    return of_process(costs, find_layers(costs, asked.layers, 1), False, tensor)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _candidates(profile: CostProfile, asked: SearchOptions) -> Iterator[Configuration]:
    tried, size = list(_families(asked)), asked.pipeline_parallel_size
    for ranks in _divisors(asked.processes) if size is None else [size]:
        replicas, rest = divmod(asked.processes, ranks)
        if rest:
            raise ConfigurationError(f"{asked.processes} processes cannot be divided into pipelines of {ranks} ranks.")
        if asked.global_batch % replicas or ranks > len(profile.layers):
            continue
        batch = asked.global_batch // replicas
        for family in tried if ranks > 1 else tried[:1]:
            for stages in sorted({ranks * max(number, family.stages_per_rank) for number in asked.stages_per_rank}):
                # A schedule that folds further stages onto its own gains nothing by them.
                if stages <= len(profile.layers) and stages == _own_stages(family, ranks, stages):
                    for number in _divisors(batch):
                        wanted = asked.micro_batches is None or number in asked.micro_batches
                        # An order that is cut short is nobody's published one, and a run would warn of it.
                        if wanted and family.published(ranks, number) == number:
                            given = (family, ranks, replicas, stages, number, batch // number)
                            yield Configuration(*given, tensor=asked.tensor_parallel_size)


def _own_stages(family: Family, ranks: int, stages: int | None) -> int | ScheduleError:
    """The stages that the schedule has by itself, or why it has no place for them."""
    try:
        return family.placed(ranks, stages)[1]
    except ScheduleError as error:
        return error


def _families(asked: SearchOptions) -> Iterator[Family]:
    """The schedules that are asked for; by default all variants with a flush that go with tensor ranks."""
    in_parts = asked.tensor_parallel_size > 1
    if asked.families is None:
        found = (each for name in schedules.names() if name not in _UNUSED for each in schedules.get(name).variants())
        yield from (family for family in found if family.synchronous and (goes(family) or not in_parts))
        return
    for family in map(schedules.get, [asked.families] if isinstance(asked.families, str) else asked.families):
        if in_parts:
            check_family(family)
        yield family


@cache
def _halves(family: Family) -> bool:
    """Whether the family divides backward passes."""
    return divided_share(family.build(2, 4)) > 0


class _Search:
    """Simulates candidates.

    Args:
        predictor: of the module.
        limit: bytes that a rank may hold; infinite: any.
    """

    def __init__(self, predictor: Predictor, limit: float) -> None:
        self.predictor, self.limit = predictor, limit

    def run(self, candidates: list[Configuration], shown: int, start: float) -> SearchResult:
        """The best of the candidates, simulated in the order of their bounds."""
        heap = [(self.bound(one), number, 0) for number, one in enumerate(candidates)]
        heapify(heap)
        best: list[tuple[float, int, Configuration]] = []
        known: set[object] = set()
        ruled_out: list[tuple[float, Configuration]] = []
        simulated = 0
        while heap and not (len(best) == shown and heap[0][0] >= best[-1][0]):
            _, number, rung = heappop(heap)
            ladder = self.ladder(candidates[number])
            one = ladder[rung]
            try:
                if (order := self.order(one)) in known:
                    continue
                known.add(order)
                # an error tells what the smallest needs: that of the last rung is whole
                needed = self.peak(one, inf if one is ladder[-1] else self.limit)
                if needed <= self.limit:
                    simulated += 1
                    best = sorted([*best, (self.predictor.seconds(one), number, one)])[:shown]
                elif one is not ladder[-1]:
                    heappush(heap, (self.bound(ladder[rung + 1]), number, rung + 1))
                else:
                    ruled_out.append((needed, one))
            except ScheduleError:
                continue  # the family has no order for these numbers
        if not best:
            raise self.nothing_fits(len(candidates), ruled_out)
        return SearchResult(
            tuple(self.predictor.predict(one) for _, _, one in best),
            tuple(sorted(ruled_out, key=lambda each: each[0])),
            len(candidates),
            simulated,
            time.perf_counter() - start,
            self.limit,
        )

    def ladder(self, one: Configuration) -> list[Configuration]:
        """The configuration, and what becomes of it where it does not fit: each needs less memory."""
        sharded = [replace(one, shard_optimizer=sharding) for sharding in _shardings(one)]
        return [*sharded, *(replace(each, recompute="always") for each in sharded)]

    def peak(self, one: Configuration, limit: float = inf) -> float:
        """The most bytes that a rank holds, as of `Predictor.peak`; nobody asks where there is no limit."""
        return 0.0 if self.limit == inf else self.predictor.peak(one, limit)

    def order(self, one: Configuration) -> object:
        """What tells runs apart: small variants of a family may be the same order, of the same stages and sums."""
        schedule = self.predictor.schedule(one, self.predictor.numbers(one)[-1])
        places, sync = frozenset(schedule.placement.items()), schedule.options.get("sync")
        return replace(one, family=schedules.get("gpipe")), schedule.actions, places, sync

    def bound(self, one: Configuration) -> float:
        """A time that the configuration takes at least: its ranks' work, and their waits at both ends of a batch.

        A stage is on as many ranks as the schedule has pipes, so the ranks' lowest stages are at least 0, 1, … in turn.
        """
        costs = stage_costs(self.predictor.profile, self.predictor.layers(one), one.samples, [1] * one.stages)
        there, whole, inputs, weights = costs.forward, costs.backward, costs.backward_input, costs.backward_weight
        back = [min(b, i + w) for b, i, w in zip(whole, inputs, weights, strict=True)]  # type: ignore[arg-type]
        work = one.micro_batches * float(sum(there) + sum(back))  # type: ignore[arg-type]
        if not one.family.synchronous:
            return work / one.ranks
        if one.recompute != "never":
            # a rank keeps what its next action takes back, and then waits while the stages above run forward at least
            above = [*accumulate(there[:0:-1], initial=0.0)][::-1]  # type: ignore[index]
            work += one.micro_batches * sum(map(min, there, above))  # type: ignore[arg-type]
        # a rank that divides its passes has parts of them left when others are behind it
        ends = there if _halves(one.family) else [a + b for a, b in zip(there, back, strict=True)]  # type: ignore[arg-type]
        ways = list(accumulate(ends, initial=0.0))  # type: ignore[arg-type]
        waits = sum(ways[rank // one.family.pipes] for rank in range(one.ranks))
        return float(work + waits) / one.ranks + self.predictor.profile.batch

    def nothing_fits(self, number: int, ruled_out: Sequence[tuple[float, Configuration]]) -> ConfigurationError:
        """The error if no configuration is left."""
        if not ruled_out:
            return ConfigurationError(
                f"None of {number} configurations can be built.",
                hint="Use no more stages than layers, of which some schedules have two for each rank, and a global "
                "batch that replicas and micro-batches divide.",
            )
        needed, small = min(ruled_out, key=lambda each: each[0])
        return ConfigurationError(
            f"Nothing fits into {amount_of_memory(self.limit)} per rank: the smallest of {number} configurations, "
            f"{small.label}, needs {amount_of_memory(needed)}.",
            hint="Use more ranks, or a smaller global batch.",
        )


def _shardings(one: Configuration) -> list[Sharding]:
    """What holders may divide so that each needs less and less memory; it costs the time to share updates.

    To divide gradients as well, once a stage is done, makes room for those of other stages of the rank alone.
    """
    if one.tensor > 1:
        return [False, "parameters"] if one.replicas > 1 else [False]
    if one.replicas * one.family.pipes == 1:
        return [False]
    return [False, True, "gradients"] if one.stages * one.family.pipes > one.ranks else [False, True]
