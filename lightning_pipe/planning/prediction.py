"""Time and memory of one configuration, from the costs of the layers."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from typing import Any, NamedTuple

from lightning_pipe.config import Sharding, divided
from lightning_pipe.partition import balance
from lightning_pipe.planning.cost_profile import MOMENTS, CostProfile, TiedSizes
from lightning_pipe.planning.division import Factors, factors
from lightning_pipe.schedules import Family, Kind, Schedule, with_recompute
from lightning_pipe.schedules.passes.recompute import Mode as Recompute
from lightning_pipe.simulate import Costs, Link, Memory, peak
from lightning_pipe.simulate.memory import held_by
from lightning_pipe.simulate.simulator import makespan
from lightning_pipe.text import several


@dataclass(frozen=True)
class Configuration:
    """How a run is arranged; the global batch is ``samples x micro_batches x replicas``.

    Args:
        family: the schedule.
        ranks: of one pipeline.
        replicas: pipelines side by side.
        stages: the module is cut into.
        micro_batches: of one pipeline's batch.
        samples: of one micro-batch.
        recompute: whether activations are computed again.
        shard_optimizer: what holders of the same parameters divide.
        layers: of every stage; ``None``: so that the slowest stage is fastest.
        tensor: processes that compute a layer together.
    """

    family: Family
    ranks: int
    replicas: int
    stages: int
    micro_batches: int
    samples: int
    recompute: Recompute = "never"
    shard_optimizer: Sharding = False
    layers: tuple[int, ...] | None = None
    tensor: int = 1

    @property
    def label(self) -> str:
        """``1f1b, 8 micro-batches of 4, 2 ranks x 4 replicas, recompute``."""
        words, tensor = divided(self.shard_optimizer), f" x {self.tensor} tensor ranks" * (self.tensor > 1)
        extra = [tensor, ", recompute" * (self.recompute != "never"), f", {words}" * bool(words)]
        return (
            f"{self.family.label}, {several(self.micro_batches, 'micro-batch')} of {self.samples}, "
            f"{several(self.ranks, 'rank')} x {several(self.replicas, 'replica')}{''.join(extra)}"
        )


@dataclass(frozen=True)
class Prediction:
    """What a configuration is predicted to take.

    ``compute + recompute + step + bubble + communication + reduction = seconds``.

    Args:
        configuration: what.
        layers: layers of every stage.
        seconds: of one optimizer step.
        compute: the mean rank's forward and backward passes.
        recompute: its repeated forward passes.
        step: its optimizer step, and what a batch takes besides its actions.
        bubble: its waits for other ranks if messages took no time.
        communication: by how much messages make the step longer.
        reduction: by how much sums of gradients over copies make it longer, and the updates that copies share.
        bytes: the most that a rank holds.
    """

    configuration: Configuration
    layers: tuple[int, ...]
    seconds: float
    compute: float
    recompute: float
    step: float
    bubble: float
    communication: float
    reduction: float
    bytes: float

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `PipeStrategy` for it."""
        own = self.configuration
        return {
            "schedule": own.family,
            "micro_batches": own.micro_batches,
            "pipeline_parallel_size": own.ranks,
            "data_parallel_size": own.replicas,
            "stages": own.stages,
            "balance": list(self.layers),
            "recompute": own.recompute,
            "shard_optimizer": own.shard_optimizer,
            "tensor_parallel_size": own.tensor,
        }


class Predictor:
    """Predicts configurations of one module; schedules and cuts are remembered.

    Args:
        profile: the costs of its layers, on one of the tensor ranks that compute them.
    """

    def __init__(self, profile: CostProfile) -> None:
        self.profile = profile
        self._at = cache(profile.at)
        self.cut = cache(self._divided)
        self._built = cache(_built)
        self._passed = cache(self._passes)
        self._schedule = cache(lambda recompute, *given: with_recompute(self._built(*given), recompute))

    def layers(self, one: Configuration) -> tuple[int, ...]:
        """Layers of every stage; if the configuration does not say, so that the slowest stage is fastest."""
        return one.layers or self.cut(one.stages, one.samples)

    def costs(self, one: Configuration, layers: Sequence[int], schedule: Schedule) -> Costs:
        """Seconds of every stage, with the engine's own work."""
        return stage_costs(self.profile, layers, one.samples, copies_of(one, schedule), one.shard_optimizer)

    def memory(self, one: Configuration, layers: Sequence[int], schedule: Schedule) -> Memory:
        """Bytes of every stage."""
        holders = [frozenset(schedule.holders(stage)) for stage in range(one.stages)]
        return stage_memory(self.profile, layers, one.samples, copies_of(one, schedule), one.shard_optimizer, holders)

    def seconds(self, one: Configuration) -> float:
        """Time of one optimizer step."""
        return self._passed(one) + self.profile.batch + self._tied_sums(one, self.layers(one))

    def _passes(self, one: Configuration) -> float:
        layers = self.layers(one)
        return self._over_time(one, lambda schedule: self.costs(one, layers, schedule))

    def peak(self, one: Configuration, limit: float = inf) -> float:
        """The most bytes that a rank holds; over the limit those of the first rank that holds more, found sooner."""
        layers, most = self.layers(one), 0.0
        for held in self._along(one, lambda schedule: rank_bytes(schedule, self.memory(one, layers, schedule))):
            most = max(most, held)
            if most > limit:
                break
        return most

    def predict(self, one: Configuration) -> Prediction:
        """Predict time and memory of one configuration."""
        layers = self.layers(one)

        def without(**nothing: Any) -> float:
            return self._over_time(one, lambda schedule: replace(self.costs(one, layers, schedule), **nothing))

        schedule, tied = self.schedule(one, one.ranks), self._tied_sums(one, layers)
        costs = self.costs(one, layers, schedule)
        unshared = replace(self.profile, all_reduce=Link())
        updates = stage_costs(unshared, layers, one.samples, copies_of(one, schedule), one.shard_optimizer).step
        alone = {"reduce": 0, "step": updates}
        whole, unreduced, local = self._passed(one), without(**alone), without(**alone, send=0)
        sums = [costs.forward, costs.backward, costs.backward_input, costs.backward_weight, updates]
        forward, backward, half_input, half_weight, step = (sum(each) / one.ranks for each in sums)  # type: ignore[arg-type]
        backward += divided_share(schedule) * (half_input + half_weight - backward)
        recompute = forward * one.micro_batches if one.recompute != "never" else 0.0
        compute = (forward + backward) * one.micro_batches
        return Prediction(
            one,
            layers,
            seconds=whole + self.profile.batch + tied,
            compute=compute,
            recompute=recompute,
            step=step + self.profile.batch,
            bubble=max(0.0, local - compute - recompute - step),
            communication=unreduced - local,
            reduction=whole - unreduced + tied,
            bytes=self.peak(one),
        )

    def schedule(self, one: Configuration, micro_batches: int) -> Schedule:
        """The schedule of a configuration for another number of micro-batches."""
        return self._schedule(one.recompute, one.family, one.ranks, micro_batches, one.stages)

    def _tied_sums(self, one: Configuration, layers: Sequence[int]) -> float:
        """Seconds in which tied parameters are summed over the ranks that hold them, and shared, at the end."""
        if not self.profile.tied:
            return 0.0
        ends = list(accumulate(layers))
        holders = self.schedule(one, one.ranks).holders
        seconds = 0.0
        for tied in self.profile.tied:
            stages = {bisect_right(ends, layer) for layer in tied.layers}
            if len(stages) > 1:
                copies = one.replicas * len({rank for stage in stages for rank in holders(stage)})
                size = tied.parameter_bytes - tied.frozen_bytes
                # FSDP leaves whole what several layers have
                sharding = False if one.shard_optimizer == "parameters" else one.shard_optimizer
                sums, shares = _together(self.profile, size, copies, sharding)
                seconds += sums + shares
        return seconds

    def _over_time(self, one: Configuration, costs: Callable[[Schedule], Costs]) -> float:
        if one.family.synchronous:
            return next(self._along(one, lambda schedule: [float(makespan(schedule, costs(schedule)))]))
        # Without a flush: what one batch more takes, once ranks are filled.
        fill = -(-2 * one.ranks // one.micro_batches)
        few, more = (self.schedule(one, (fill + number) * one.micro_batches) for number in (1, 2))
        return float(makespan(more, costs(more)) - makespan(few, costs(few)))

    def numbers(self, one: Configuration) -> tuple[int, ...]:
        """Micro-batches of the schedules that tell of a configuration: its own, or few where its order repeats."""
        period = one.ranks if one.family.pipes == 1 and one.ranks % 2 == 0 else 2 * one.ranks
        if one.micro_batches <= 5 * period or not one.family.synchronous:
            return (one.micro_batches,)
        few = one.micro_batches % period + 3 * period
        return few, few + period

    def _along(self, one: Configuration, values: Callable[[Schedule], Iterable[float]]) -> Iterator[float]:
        """Values that grow evenly with the micro-batches, once there are enough of them for the order to repeat."""
        numbers = self.numbers(one)
        few, more = numbers[0], numbers[-1]
        times = (one.micro_batches - few) / max(1, more - few)
        for each in zip(*(values(self.schedule(one, number)) for number in numbers), strict=True):
            yield each[0] + (each[-1] - each[0]) * times

    def _divided(self, stages: int, samples: int) -> tuple[int, ...]:
        at = self._at(samples)
        return tuple(balance([f + b for f, b in zip(at.forward, at.backward, strict=True)], stages))


def _built(family: Family, ranks: int, micro_batches: int, stages: int) -> Schedule:
    with warnings.catch_warnings(action="ignore"):  # an order that is cut short is predicted as it is
        return family.unchecked(ranks, micro_batches, stages)


def divided_share(schedule: Schedule) -> float:
    """The share of its backward passes whose halves run apart."""
    kinds = Counter(action.kind for order in schedule.actions for action in order)
    return kinds[Kind.BACKWARD_INPUT] / (kinds[Kind.BACKWARD_INPUT] + kinds[Kind.BACKWARD])


def copies_of(one: Configuration, schedule: Schedule) -> tuple[int, ...]:
    """How many ranks of all replicas hold each stage."""
    return tuple(one.replicas * len(schedule.holders(stage)) for stage in range(one.stages))


def stage_costs(
    profile: CostProfile, layers: Sequence[int], samples: int, copies: Sequence[int], shard_optimizer: Sharding = False
) -> Costs:
    """Seconds of every stage.

    Args:
        profile: the costs of the layers.
        layers: layers of every stage.
        samples: of a micro-batch.
        copies: ranks that hold each stage.
        shard_optimizer: what these divide: an optimizer step then ends when the updates are shared.
    """
    at = profile.at(samples)
    spans = list(pairwise(accumulate(layers, initial=0)))

    def sums(values: Sequence[float], beside: float = 0.0) -> list[float]:
        return [beside + sum(values[start:end]) for start, end in spans]

    weights = _weights(profile, spans)
    together = [
        _together(profile, each.trained - each.elsewhere, number, shard_optimizer)
        for each, number in zip(weights, copies, strict=True)
    ]
    reduce, shares = zip(*together, strict=True)
    held = [each.divided(number, shard_optimizer) for each, number in zip(weights, copies, strict=True)]
    updates = [profile.step_per_byte * each.optimizer / MOMENTS for each in held]
    forward = sums(at.forward, at.stage_forward + profile.overhead)
    backward = sums(at.backward, at.stage_backward + profile.overhead)
    beside_half = at.stage_backward / 2 + profile.overhead
    half_input, half_weight = sums(at.backward_input, beside_half), sums(at.backward_weight, beside_half)
    return Costs(
        forward,
        backward,
        # nothing waits for the first stage, which does all of its pass in the second half
        backward_input=[profile.overhead, *half_input[1:]],
        backward_weight=[backward[0], *half_weight[1:]],
        send=[float(profile.message.message(at.boundary_bytes[end - 1])) for _, end in spans],
        reduce=reduce,
        step=[update + share for update, share in zip(updates, shares, strict=True)],
    )


def _together(profile: CostProfile, size: float, copies: int, shard_optimizer: Sharding) -> tuple[float, float]:
    """Seconds in which the holders of parameters sum their gradients, and share what each of them has updated."""
    link = profile.all_reduce
    reduce = link.all_shares if shard_optimizer in ("gradients", "parameters") else link.all_reduce
    return float(reduce(size, copies)), float(link.all_shares(size, copies)) if shard_optimizer else 0.0


class _StageWeights(NamedTuple):
    """Bytes of parameters.

    Args:
        held: those that a stage holds.
        trained: those of them that are trained.
        tied: those of these that several layers have.
        elsewhere: those of these that other stages have, too; they are summed at the end of a batch.
    """

    held: float
    trained: float
    tied: float
    elsewhere: float

    def divided(self, holders: int, sharding: Sharding) -> Factors:
        """The bytes of one of several holders. FSDP leaves whole what several layers have."""
        own, whole = factors(holders, sharding), self.tied if sharding == "parameters" else 0.0
        rest = self.trained - whole
        return Factors(
            whole + (self.held - whole) * own.values,
            whole + rest * own.summed,
            MOMENTS * whole + rest * own.optimizer,
        )


def _weights(
    profile: CostProfile, spans: Sequence[tuple[int, int]], holders: Sequence[frozenset[int]] = ()
) -> list[_StageWeights]:
    """The parameters of every stage; what stages on the same ranks have in common counts at the last of them alone.

    There its gradient begins: the last stage runs back first.
    """
    found, counted = list[_StageWeights](), set[tuple[TiedSizes, frozenset[int]]]()
    for stage, (start, end) in reversed([*enumerate(spans)]):
        held = float(sum(layer.parameter_bytes for layer in profile.layers[start:end]))
        frozen = float(sum(layer.frozen_bytes for layer in profile.layers[start:end]))
        common = elsewhere = 0.0
        for tied in profile.tied:
            here, trained = sum(start <= layer < end for layer in tied.layers), tied.parameter_bytes - tied.frozen_bytes
            if not here:
                continue
            again = bool(holders) and (tied, holders[stage]) in counted
            counted |= {(tied, holders[stage])} if holders else set()
            held -= (here - 1 + again) * tied.parameter_bytes  # the layers of a stage have them once
            frozen -= (here - 1 + again) * tied.frozen_bytes
            common += trained * (not again)
            elsewhere += trained * (here < len(tied.layers) and not again)
        found.append(_StageWeights(held, held - frozen, common, elsewhere))
    return found[::-1]


def stage_memory(
    profile: CostProfile,
    layers: Sequence[int],
    samples: int,
    copies: Sequence[int],
    shard_optimizer: Sharding = False,
    holders: Sequence[frozenset[int]] = (),
) -> Memory:
    """Bytes of every stage: weights, gradients, two optimizer moments, and activations of one micro-batch.

    Gradients are whole while the backward passes of a stage run, whatever their holders divide: only what they keep of
    the sums is a share. Of parameters that layers have in common ranks hold one, if ``holders`` says which ranks hold
    each stage; by default no two stages are on the same ranks.
    """
    at = profile.at(samples)
    spans = list(pairwise(accumulate(layers, initial=0)))
    weights = _weights(profile, spans, holders)
    own = [each.divided(n, shard_optimizer) for each, n in zip(weights, copies, strict=True)]
    inputs = [at.boundary_bytes[start - 1] if start else 0.0 for start, _ in spans]
    return Memory(
        [each.values for each in own],
        gradients=[each.trained for each in weights],
        summed=[each.summed for each in own],
        optimizer=[each.optimizer for each in own],
        # what has come from another rank is held even where no layer keeps it: its gradient is sent back
        activations=[sum(at.saved_bytes[start:end], came) for (start, end), came in zip(spans, inputs, strict=True)],
        inputs=inputs,
        messages=[at.boundary_bytes[end - 1] for _, end in spans],
    )


def rank_bytes(schedule: Schedule, memory: Memory) -> Iterator[float]:
    """The most that every rank holds: activations and gradients by the order of actions, and one message each way."""
    for rank in range(schedule.ranks):
        own = map(memory.at, schedule.stages_of(rank))
        message = max((each.messages + each.inputs for each in own), default=0)
        yield float(peak(held_by(rank, schedule, memory)).total + message)
