"""The cost model of Chimera's machine: who waits for sums, what the ends of a model and small micro-batches take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightning_pipe.planning.prediction import Configuration
from lightning_pipe.schedules import GEMS, Chimera, Family, OneFOneB, PipeDream2BW
from lightning_pipe.simulate import Costs, simulate
from recipes.reproduce.counted import sizes_of_stages
from recipes.reproduce.piz_daint import HEAD, Machine
from recipes.reproduce.searching import OnPizDaint

MACHINE = Machine(floor=6e-3, gpt2=6e-3, p2p=3e8, all_reduce=1e9, together=2, switch=4e-4, allocator=1.3, calibrated={})


def costs(family: Family, batch: float = 8, machine: Machine = MACHINE, *, recompute: bool = False) -> Costs:
    return machine.costs(family, "Bert-48", 4, 8, 1, batch, recompute=recompute)


def of_stages(cost: object) -> Sequence[float]:
    assert isinstance(cost, Sequence)
    return [float(each) for each in cost]


def behind_the_passes(family: Family) -> float:
    """Seconds that sums make a batch longer."""
    own, built = costs(family), family.build(4, 4)
    return float(simulate(built, own).makespan - simulate(built, replace(own, reduce=0)).makespan)


def test_baselines_wait_for_their_sums_gems_for_two_and_chimera_for_half_of_those_that_nothing_hides() -> None:
    sums = [2 * 7 / 8 * 4 * size / 1e9 for size in sizes_of_stages("Bert-48", 4)]
    assert of_stages(costs(OneFOneB()).reduce) == pytest.approx(sums)
    one_f_one_b, gems, chimera = map(behind_the_passes, (OneFOneB(), GEMS(), Chimera()))
    # not exactly: ranks with smaller stages have shorter optimizer steps as well
    assert one_f_one_b == pytest.approx(max(sums), rel=0.1)
    assert gems == pytest.approx(sums[0] + sums[3], rel=0.1)
    assert chimera < (sums[0] + sums[3]) / 2
    alone = replace(MACHINE, together=1)
    twice = [2 * each for each in of_stages(costs(Chimera()).reduce)]
    assert of_stages(costs(Chimera(), machine=alone).reduce) == pytest.approx(twice)


def test_the_last_stage_has_the_head_and_the_first_one_the_gradient_of_its_embedding() -> None:
    forward, backward = MACHINE.block("Bert-48", 8)
    there, back = of_stages(costs(OneFOneB()).forward), of_stages(costs(OneFOneB()).backward)
    assert there == pytest.approx([12 * forward] * 3 + [(12 + HEAD["Bert-48"]) * forward])
    assert back[3] == pytest.approx((12 + HEAD["Bert-48"]) * backward)
    assert back[0] > back[1] == pytest.approx(12 * backward)


def test_blocks_have_a_floor_and_are_those_of_the_profile_above_it() -> None:
    assert MACHINE.block("Bert-48", 8) == pytest.approx((4.5e-3, 7.653e-3))
    small = costs(OneFOneB(), 1)
    assert of_stages(small.forward)[1] + of_stages(small.backward)[1] == pytest.approx(12 * MACHINE.floor)
    assert MACHINE.block("GPT-2", 1)[0] == pytest.approx(MACHINE.gpt2)


def test_recomputation_is_behind_the_gradient_and_not_on_the_last_stage_without_a_flush() -> None:
    flushed, again = (of_stages(costs(OneFOneB(), recompute=each).backward) for each in (False, True))
    there = of_stages(costs(OneFOneB()).forward)
    assert [b - a for a, b in zip(flushed, again, strict=True)] == pytest.approx(there)
    plain, repeated = (of_stages(costs(PipeDream2BW(4), recompute=each).backward) for each in (False, True))
    assert [b - a for a, b in zip(plain, repeated, strict=True)] == pytest.approx([*there[:3], 0])
    assert plain[1] - flushed[1] == pytest.approx(12 * 16 * MACHINE.switch)


def test_halves_share_a_forward_pass() -> None:
    half = of_stages(costs(Chimera(scaling="backward_halving"), 4).forward)
    assert [2 * each for each in half] == pytest.approx(of_stages(costs(Chimera(), 8).forward))


def test_without_a_flush_a_batch_takes_as_long_as_the_next_one() -> None:
    speeds = [MACHINE.speed("2BW", "Bert-48", 8, 4, 16, total, True) for total in (512, 512 * 64)]
    assert speeds[1] > speeds[0], "sums come less often"
    own = costs(PipeDream2BW(4), 16, recompute=True)
    slowest = max(map(sum, zip(of_stages(own.forward), of_stages(own.backward), strict=True)))
    assert speeds[1] < 8 * 16 / slowest


def test_the_search_charges_forward_doubling_for_its_recomputation() -> None:
    predictor = OnPizDaint(MACHINE, "Bert-48")
    one = Configuration(Chimera(scaling="forward_doubling"), 4, 8, 4, 8, 8)
    doubled = predictor.costs(one, (12,) * 4, predictor.schedule(one, 8))
    again = costs(Chimera(), recompute=True)
    assert of_stages(doubled.backward) == pytest.approx(of_stages(again.backward))
