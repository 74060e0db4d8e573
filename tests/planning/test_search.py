"""The search against trying everything, and what it says about itself."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import product
from math import inf
from random import Random
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

import lightning_pipe
from lightning_pipe import PipeStrategy, schedules
from lightning_pipe.config import Sharding
from lightning_pipe.errors import ConfigurationError, ScheduleError
from lightning_pipe.partition import find_layers
from lightning_pipe.planning.cost_profile import CostProfile, LayerSizes, SizeCosts, TiedSizes
from lightning_pipe.planning.layer_sizes import of_module, without_times
from lightning_pipe.planning.options import SearchOptions
from lightning_pipe.planning.prediction import (
    Configuration,
    Prediction,
    Predictor,
    rank_bytes,
    stage_costs,
    stage_memory,
)
from lightning_pipe.planning.search import _candidates, _Search, _shardings, search
from lightning_pipe.simulate import Link, memory_over_time, peak, simulate
from tests.support import oracle
from tests.support.lit_modules import Data, Lit
from tests.support.pairs import slow_but
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

MIB = 2**20


def profile(layers: int = 16, *, slow_first: float = 1.0, message: float = 2e-5) -> CostProfile:
    """A transformer whose first layer may be slower than the others."""

    def costs(samples: int) -> SizeCosts:
        forward = tuple(0.001 * (samples + 0.5) * (slow_first if layer == 0 else 1) for layer in range(layers))
        backward = tuple(2 * each for each in forward)
        saved, message = (10.0 * MIB * samples,) * layers, (1.0 * MIB * samples,) * layers
        return SizeCosts(forward, backward, forward, saved, message, 1e-4, 1e-4)

    sizes = {samples: costs(samples) for samples in (1, 8)}
    names = tuple(LayerSizes(f"h.{layer}", 3 * MIB, 12 * MIB) for layer in range(layers))
    return CostProfile("Net", names, sizes, Link(message, 1e-10), Link(message, 1e-10), 2e-5, 1e-3, 1e-11)


def with_slow_halves(costs: CostProfile) -> CostProfile:
    """The halves of a backward pass together take one and a half times as long as the whole."""
    sizes = {
        samples: replace(
            each,
            backward_input=tuple(0.9 * seconds for seconds in each.backward),
            backward_weight=tuple(0.6 * seconds for seconds in each.backward),
        )
        for samples, each in costs.sizes.items()
    }
    return replace(costs, sizes=sizes)


def test_halves_may_take_longer_than_the_whole_and_the_first_stage_has_none() -> None:
    costs = with_slow_halves(profile(4))
    found = stage_costs(costs, (2, 2), 1, (1, 1))
    whole = 2 * 0.003 + 1e-4 + 2e-5
    assert found.backward == pytest.approx([whole, whole])
    assert found.backward_input == pytest.approx([2e-5, 0.9 * 0.006 + 0.5e-4 + 2e-5])
    assert found.backward_weight == pytest.approx([whole, 0.6 * 0.006 + 0.5e-4 + 2e-5])
    one = Configuration(schedules.get("zero_bubble"), 2, 1, 2, 8, 1)
    plain, slow = (Predictor(each).predict(one) for each in (profile(4), costs))
    # the last stage is busy all the time; one more half of its pass for each micro-batch
    assert slow.seconds - plain.seconds == pytest.approx(8 * 0.5 * 0.006, rel=0.1)
    assert slow.compute - plain.compute == pytest.approx(8 * 0.5 * 0.006 / 2, rel=0.1)


def test_tied_parameters_are_summed_over_the_ranks_that_hold_them() -> None:
    tied = replace(profile(4), tied=(TiedSizes((0, 3), 8 * MIB),))
    sums = profile(4).all_reduce.all_reduce
    for name, replicas, stages, copies in (("1f1b", 1, 2, 2), ("1f1b", 2, 2, 4), ("dualpipev", 1, 4, 1)):
        one = Configuration(schedules.get(name), 2, replicas, stages, 8, 1)
        with_, without = Predictor(tied).predict(one), Predictor(profile(4)).predict(one)
        if replicas == 1:
            assert with_.reduction - without.reduction == pytest.approx(sums(8 * MIB, copies), abs=1e-12)
        # a stage's own sum is without them
        costs = stage_costs(tied, (2, 2), 1, (2, 2))
        assert costs.reduce == pytest.approx([sums((24 - 8) * MIB, 2)] * 2)
        assert Predictor(tied).seconds(one) == pytest.approx(with_.seconds)


def test_a_divided_step_is_predicted_with_what_its_holders_share() -> None:
    """By hand: rank 0 is done last, sums its stage with nothing beside it, updates its share and shares it."""
    size, latency, tied = 2 * 12 * MIB, 2e-5, 8 * MIB
    halves = {
        False: (2 * latency + 1e-10 * size, 0.0),
        True: (2 * latency + 1e-10 * size, 2 * latency + 0.5e-10 * size),
        "gradients": (2 * latency + 0.5e-10 * size, 2 * latency + 0.5e-10 * size),
    }
    at_end = {  # of the tied parameter, over all four processes
        False: 4 * latency + 1.5e-10 * tied,
        True: 4 * latency + 1.5e-10 * tied + 8 * latency + 0.75e-10 * tied,
        "gradients": 2 * (8 * latency + 0.75e-10 * tied),
    }
    one = Configuration(schedules.get("1f1b"), 2, 2, 2, 8, 1)
    unreduced = Predictor(replace(profile(4), step_per_byte=0.0)).predict(replace(one, replicas=1))
    sharding: Sharding
    for sharding, (reduce, share) in halves.items():  # type: ignore[assignment]
        found = Predictor(profile(4)).predict(replace(one, shard_optimizer=sharding))
        update = 1e-11 * size / (2 if sharding else 1)
        assert found.seconds == pytest.approx(unreduced.seconds + reduce + update + share, rel=1e-12)
        assert found.reduction == pytest.approx(reduce + share, rel=1e-9)
        assert found.step == pytest.approx(update + 1e-3, rel=1e-12)
        with_tied = replace(profile(4), tied=(TiedSizes((0, 3), tied),))
        more = Predictor(with_tied)._tied_sums(replace(one, shard_optimizer=sharding), (2, 2))
        assert more == pytest.approx(at_end[sharding], rel=1e-12)


def test_a_module_knows_its_tied_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

    module = Tied()
    assert without_times(module, find_layers(module)).tied == (TiedSizes((0, 2), 160),)
    assert without_times(module.layers, find_layers(module.layers)).tied == ()


def test_what_is_frozen_has_neither_gradients_nor_updates() -> None:
    net = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 100))
    net[3].weight = net[0].weight
    net[0].weight.requires_grad_(False)
    net[1].requires_grad_(False)
    trained = tuple(replace(each, frozen_bytes=0) for each in without_times(net, find_layers(net)).layers)
    found = of_module(replace(profile(4), layers=trained), without_times(net, find_layers(net)))
    assert found.tied == (TiedSizes((0, 3), 3200, 3200),)
    memory = stage_memory(found, (2, 2), 1, (1, 1))
    assert (memory.weights, memory.gradients) == ([3488, 3888], [0, 688])
    assert (memory.summed, memory.optimizer) == ([0, 688], [0, 1376])
    costs = stage_costs(found, (2, 2), 1, (2, 2))
    sums = found.all_reduce.all_reduce
    assert costs.reduce == pytest.approx([float(sums(0, 2)), float(sums(688, 2))])
    assert costs.step == pytest.approx([0, 688 * found.step_per_byte])


def test_what_layers_have_in_common_counts_once_on_each_stage_that_holds_it() -> None:
    """A head among the layers with the embedding's matrix: no stage holds less than nothing, or two of it."""
    net = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 100))
    net[3].weight = net[0].weight
    layers = find_layers(net)
    tied = without_times(net, layers).tied
    assert tied == (TiedSizes((0, 3), 3200),)
    found = replace(profile(4), layers=without_times(net, layers).layers, tied=tied)
    sums = found.all_reduce.all_reduce
    for counts, held in (((2, 2), (3488, 3888)), ((1, 3), (3200, 4176)), ((4,), (4176,))):
        assert stage_memory(found, counts, 1, (1,) * len(counts)).weights == list(held)
        own = [size - 3200 * (len(counts) > 1) for size in held]
        assert stage_costs(found, counts, 1, (2,) * len(counts)).reduce == pytest.approx([sums(o, 2) for o in own])


def test_the_best_are_those_of_trying_everything() -> None:
    slow = with_slow_halves(profile(slow_first=2.5, message=2e-3))
    uneven = replace(slow, tied=(TiedSizes((0, 15), 8 * MIB),))
    for costs, limit in ((uneven, inf), (profile(), 400.0 * MIB)):
        engine = _Search(Predictor(costs), limit)
        different = {}
        for one in _candidates(costs, SearchOptions(4, 16)):
            fits = (each for each in engine.ladder(one) if engine.peak(each) <= limit)
            if (fitting := next(fits, None)) is not None:
                schedule = engine.predictor.schedule(fitting, fitting.micro_batches)
                order = (
                    schedule.actions,
                    tuple(sorted(schedule.placement.items())),
                    fitting.family.options().get("sync"),
                )
                numbers = (fitting.replicas, fitting.samples, fitting.shard_optimizer, fitting.layers)
                different[order, numbers] = engine.predictor.seconds(fitting)
        times = list(different.values())
        found = search(costs, 4, 16, memory=None if limit == inf else limit)
        assert [choice.seconds for choice in found.choices] == pytest.approx(sorted(times)[:10])
        assert found.considered >= len(times)
        assert limit < inf or found.simulated < len(times)


def test_equal_schedules_are_shown_once() -> None:
    """With as many micro-batches as ranks variants are the same order, of which the family's own name is shown."""
    shown = search(profile(8), 2, 8, shown=14).choices
    at = [(each.configuration.family.label, each.configuration.micro_batches) for each in shown]
    assert ("chimera", 2) in at
    assert ("zero_bubble", 2) in at
    assert not {("chimera scaling=backward_halving", 2), ("zero_bubble variant=h2", 2)} & {*at}
    assert ("zero_bubble variant=h2", 4) in at
    assert len(shown) == 14


def test_the_same_order_on_stages_that_more_ranks_hold_is_another_run() -> None:
    """Of one micro-batch GEMS has GPipe's order, and a second holder of each stage, with whom it sums."""
    engine, one = _Search(Predictor(profile(4)), inf), Configuration(schedules.get("gpipe"), 2, 2, 2, 1, 2)
    with_copies = replace(one, family=schedules.get("gems"))
    assert engine.predictor.schedule(one, 1).actions == engine.predictor.schedule(with_copies, 1).actions
    assert engine.predictor.seconds(one) < engine.predictor.seconds(with_copies)
    assert engine.order(one) != engine.order(with_copies)


def random_profile(rng: Random) -> CostProfile:
    """Uneven in every respect: layers that take next to nothing beside long ones, slow links, slow updates.

    With as few layers as ranks no cut makes stages even.
    """
    layers = range(rng.choice((2, 3, 4, 8)))
    long = [rng.choice((0.01, 0.3, 1.0)) for _ in layers]

    def each(most: float) -> tuple[float, ...]:
        return tuple(share * most * rng.random() for share in long)

    def link() -> Link:
        return Link(rng.choice((0, 0.1)) * rng.random(), rng.choice((0, 1e-8)) * rng.random())

    backward = each(2)
    halves = tuple(seconds * rng.random() for seconds in backward)
    costs = SizeCosts(each(1), backward, halves, each(10 * MIB), each(MIB), 0.1 * rng.random(), 0.1 * rng.random())
    sizes = tuple(LayerSizes(f"h.{layer}", 1, rng.randrange(rng.choice((1, 24)) * MIB)) for layer in layers)
    tied = (TiedSizes((0, layers[-1]), min(sizes[0].parameter_bytes, sizes[-1].parameter_bytes)),)
    rest = 0.01 * rng.random(), 0.1 * rng.random(), rng.choice((0, 3e-8, 1e-7)) * rng.random()
    return CostProfile("Net", sizes, {1: costs}, link(), link(), *rest, tied if rng.random() < 0.3 else ())


# with 61, 75 and 77 a bound that has updates on top of all waits is above a time, or passes over the fastest run
@pytest.mark.parametrize("seed", slow_but(range(60, 84), 61, 77))
def test_bounds_hold_and_leave_the_table_as_it_is_without_them(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    costs, ranks, batch = random_profile(rng), rng.choice((2, 3, 4)), rng.choice((4, 6, 8))
    if batch % ranks:
        batch = 2 * ranks  # else two layers on three ranks are no configuration at all
    engine = _Search(Predictor(costs), inf)
    for one in _candidates(costs, SearchOptions(ranks, batch, families=schedules.names())):
        for each in engine.ladder(one):
            assert engine.bound(each) <= engine.predictor.seconds(each) * (1 + 1e-9), each.label
    for memory in (None, rng.choice([choice.bytes for choice in search(costs, ranks, batch).choices])):
        given = {"ranks": ranks, "global_batch": batch, "memory": memory, "shown": rng.choice((1, 3, 10))}
        pruned = search(costs, **given)
        with monkeypatch.context() as patch:
            patch.setattr(_Search, "bound", lambda self, one: 0.0)
            whole = search(costs, **given)
        assert [one.seconds for one in pruned.choices] == [one.seconds for one in whole.choices]


def test_parts_add_up_and_agree_with_the_simulator() -> None:
    for choice in search(profile(), 4, 16).choices:
        parts = (choice.compute, choice.recompute, choice.step, choice.bubble, choice.communication, choice.reduction)
        assert sum(parts) == pytest.approx(choice.seconds, rel=0.02)
        assert all(part >= 0 for part in parts)
        predictor, one = Predictor(profile()), choice.configuration
        schedule = predictor.schedule(one, one.micro_batches)
        timeline = simulate(schedule, predictor.costs(one, choice.layers, schedule))
        assert timeline.makespan + 1e-3 == pytest.approx(choice.seconds)


def test_many_micro_batches_are_predicted_from_few() -> None:
    """Orders repeat: what is predicted for many micro-batches is the simulation of all of them."""
    predictor = Predictor(profile())
    for name, number in product(("gpipe", "1f1b", "zero_bubble", "chimera", "gems", "dualpipe"), (64, 67)):
        one = Configuration(schedules.get(name), 4, 1, 4, number, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule = one.family.build(4, number, 4)
        layers = predictor.layers(one)
        exact = simulate(schedule, predictor.costs(one, layers, schedule)).makespan + 1e-3
        assert predictor.seconds(one) == pytest.approx(exact, rel=2e-3)
        assert predictor.peak(one) == pytest.approx(max(rank_bytes(schedule, predictor.memory(one, layers, schedule))))


def test_memory_is_that_of_the_simulator_and_a_message_each_way() -> None:
    predictor = Predictor(profile())
    shardings: tuple[Sharding, ...] = (False, True, "gradients")
    for name, recompute, sharding in product(
        ("gpipe", "1f1b", "interleaved", "chimera"), ("never", "always"), shardings
    ):
        family = schedules.get(name)
        one = Configuration(family, 4, 2, 4 * family.stages_per_rank, 8, 2, recompute, sharding)  # type: ignore[arg-type]
        schedule = predictor.schedule(one, 8)
        memory = predictor.memory(one, predictor.layers(one), schedule)
        simulated = max(float(peak(points).total) for points in memory_over_time(schedule, memory))
        assert simulated <= predictor.peak(one) <= simulated + 4 * 2 * MIB


def test_memory_limits_shard_and_recompute_and_rule_out() -> None:
    free = search(profile(), 4, 32, families=["1f1b"], pipeline_parallel_size=2)
    assert free.best.configuration.recompute == "never"
    assert not free.ruled_out
    tight = search(profile(), 4, 32, families=["1f1b"], pipeline_parallel_size=2, memory=0.9 * free.best.bytes)
    assert all(choice.bytes <= 0.9 * free.best.bytes for choice in tight.choices)
    tightest = search(profile(), 4, 32, families=["gpipe"], pipeline_parallel_size=2, memory=390.0 * MIB)
    assert tightest.best.configuration.recompute == "always"
    assert tightest.best.configuration.shard_optimizer
    assert tightest.best.recompute > 0
    assert tightest.ruled_out
    with pytest.raises(ConfigurationError, match=r"Nothing fits into 1 MiB per rank: the smallest of .* needs"):
        search(profile(), 4, 32, memory=1.0 * MIB)


def test_a_limit_of_memory_picks_the_schedule() -> None:
    """Half of the activations where they are enough, a third where they must be, and only then recomputation."""
    numbers: dict[str, Any] = {"pipeline_parallel_size": 4, "micro_batches": [8]}
    found = {
        limit: search(profile(), 4, 8, memory=limit * MIB, **numbers).best for limit in (370.0, 330.0, 290.0, 250.0)
    }
    assert [best.configuration.family.label for best in found.values()][:3] == [
        "zero_bubble variant=v",
        "zero_bubble variant=v_half",
        "zero_bubble variant=v_min",
    ]
    assert [best.configuration.recompute for best in found.values()] == ["never", "never", "never", "always"]
    assert sorted(best.seconds for best in found.values()) == [best.seconds for best in found.values()]


def test_gradients_are_divided_where_that_makes_room() -> None:
    """With as many micro-batches as ranks, each rank is done with its later stage before it begins with the other."""
    predictor = Predictor(profile())
    one = Configuration(schedules.get("interleaved"), 4, 2, 8, 4, 2, "always")
    whole, state, gradients = (
        predictor.peak(replace(one, shard_optimizer=each)) for each in (False, True, "gradients")
    )
    assert whole > state > gradients
    assert state - gradients == pytest.approx(2 * 12 * MIB / 2)  # of a stage of two layers half is let go
    straight = replace(one, family=schedules.get("1f1b"), stages=4)
    peaks = {predictor.peak(replace(straight, shard_optimizer=each)) for each in (True, "gradients")}
    assert len(peaks) == 1
    assert "sharded optimizer and gradients" in replace(one, shard_optimizer="gradients").label
    assert _shardings(one) == [False, True, "gradients"]
    assert _shardings(straight) == [False, True]


def test_world_and_global_batch_stay_fixed() -> None:
    for choice in search(profile(), 8, 48).choices:
        one = choice.configuration
        assert one.ranks * one.replicas == 8
        assert one.samples * one.micro_batches * one.replicas == 48
        assert sum(choice.layers) == 16
        assert one.family.synchronous


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks of 1 or more, not 0"),
        ({"ranks": 2.5}, "ranks of 1 or more, not 2.5"),
        ({"global_batch": -1}, "global_batch of 1 or more"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size of 1 or more"),
        ({"stages_per_rank": [0, 1]}, "stages_per_rank of 1 or more"),
        ({"micro_batches": [0]}, "micro_batches of 1 or more"),
        ({"shown": 0}, "shown of 1 or more"),
        ({"micro_batches": [3]}, "None of 0 configurations can be built"),
        ({"families": []}, "None of 0 configurations can be built"),
        ({"ranks": 3, "families": ["bitpipe", "1f1b"], "micro_batches": [5]}, "None of 0 configurations can be built"),
    ],
)
def test_what_cannot_be_searched_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        search(profile(), **{"ranks": 4, "global_batch": 8, **options})


def test_ranks_that_no_schedule_takes_are_refused_with_what_it_needs() -> None:
    for options in ({}, {"pipeline_parallel_size": 3, "ranks": 6}):
        with pytest.raises(ScheduleError, match=r"'bitpipe' pairs ranks .* got ranks=3\.\nHint: Use an even number"):
            search(profile(), **{"ranks": 3, "global_batch": 12, "families": ["bitpipe", "chimera"], **options})


def test_a_given_cut_is_predicted() -> None:
    one = Configuration(schedules.get("1f1b"), 2, 1, 2, 8, 1)
    found = Predictor(profile(4)).predict(replace(one, layers=(3, 1)))
    assert found.layers == (3, 1)
    assert found.seconds > 1.3 * Predictor(profile(4)).predict(one).seconds


def test_schedules_without_a_flush_only_if_named() -> None:
    found = search(profile(), 4, 32, families=["1f1b", "pipedream_2bw"], pipeline_parallel_size=4)
    assert found.best.configuration.family.name == "pipedream_2bw"


def test_it_explains_itself() -> None:
    found = search(profile(), 4, 32, memory=800.0 * MIB)
    text = str(found)
    assert text.count("\n") > 10
    for word in ("compute", "bubble", "communication", "reduction", "recompute", "chosen:", "do not fit into 800 MiB"):
        assert word in text
    assert found.best.configuration.label in text


def test_a_large_search_looks_at_few() -> None:
    found = search(profile(64), 4096, 4096, pipeline_parallel_size=32, families=["gpipe", "1f1b", "chimera"], shown=3)
    assert found.best.configuration.replicas == 128
    assert found.simulated < found.considered


def test_a_module_is_searched_by_its_parameters() -> None:
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    found = lightning_pipe.search(net, 4, 16)
    assert set(found.best.options) >= {"schedule", "micro_batches", "balance"}
    with pytest.raises(ConfigurationError, match="cannot be divided into pipelines of 3"):
        search(net, 4, 16, pipeline_parallel_size=3)
    with pytest.raises(ConfigurationError, match="ranks of 1 or more"):
        search(net, 0, 16)


def trained(process: int, options: dict[str, Any] | None) -> list[float]:
    """The losses of a run with these options of the strategy; ``None``: on one device."""
    quiet()
    L.seed_everything(7, verbose=False)
    module, recorder = Lit().double(), oracle.Recorder()
    module.counts = False  # the schedule may have several pipes
    strategy = "auto" if options is None else PipeStrategy(**options)
    devices = 1 if options is None else 2
    trainer = L.Trainer(**QUIET, max_epochs=1, devices=devices, strategy=strategy, callbacks=[recorder])
    trainer.fit(module, Data(16).train_dataloader())
    return recorder.trace.losses


@pytest.mark.timeout(90)
def test_what_a_search_finds_trains() -> None:
    options = search(Lit(), 2, 8).best.options
    assert run_trainers(trained, 2, timeout=80, options=options)[0] == pytest.approx(trained(0, None), abs=1e-9)


def test_a_predictor_of_ones_own_takes_the_place_of_the_profile() -> None:
    class Slower(Predictor):
        def seconds(self, one: Configuration) -> float:
            return 3 * super().seconds(one)

        def predict(self, one: Configuration) -> Prediction:
            return replace(super().predict(one), seconds=self.seconds(one))

    given = {"ranks": 2, "global_batch": 8, "families": ["gpipe"]}
    plain, slower = (search(each, **given) for each in (profile(), Slower(profile())))
    assert slower.best.seconds == 3 * plain.best.seconds


def test_one_schedule_may_be_named_alone() -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    found = search(net, ranks=4, global_batch=16, families="vhalf")
    assert {each.configuration.family for each in found.choices} == {schedules.get("vhalf")}


def test_a_search_that_can_build_nothing_counts_stages() -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    with pytest.raises(ConfigurationError, match="no more stages than layers, of which some schedules have two"):
        search(net, ranks=4, global_batch=16, pipeline_parallel_size=4, families=["vhalf"])
