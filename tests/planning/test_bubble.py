"""Where idle time went: shares that add up, from what ranks have measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_pipe import plan
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.partition import find_layers
from lightning_pipe.planning.bubble import IdleShares, idle_shares, measured_costs
from lightning_pipe.planning.cost_profile import CostProfile, SizeCosts
from lightning_pipe.planning.layer_sizes import without_times
from lightning_pipe.planning.render import closing_line
from lightning_pipe.schedules import GPipe, Kind
from lightning_pipe.simulate import Costs, simulate
from lightning_pipe.text import memory

FORWARD, BACK, AGAIN = Kind.FORWARD, Kind.BACKWARD, Kind.RECOMPUTE
INPUT, WEIGHT = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def test_costs_are_means_over_ranks_and_batches() -> None:
    first = {(FORWARD, 0): (2.0, 2), (BACK, 0): (4.0, 2)}
    halves = {(FORWARD, 1): (9.0, 3), (INPUT, 1): (3.0, 3), (WEIGHT, 1): (6.0, 3)}
    costs = measured_costs([first, halves], 2)
    assert costs is not None
    assert costs.forward == [1.0, 3.0]
    assert costs.backward == [2.0, 3.0]
    both = measured_costs([first, {(FORWARD, 0): (4.0, 1), (BACK, 0): (2.0, 2), (AGAIN, 0): (5.0, 1)}], 1)
    assert both is not None
    assert (both.forward, both.backward, both.recompute) == ([2.0], [1.5], [5.0])
    assert measured_costs([{(FORWARD, 0): (2.0, 2)}], 1) is None
    assert measured_costs([{}], 2) is None


def test_shares_add_up_to_what_was_measured() -> None:
    schedule, costs = GPipe().build(2, 8), Costs([1.0, 2.0], [2.0, 4.0])
    by_stages = float(simulate(schedule, costs).bubble_ratio)
    shares = idle_shares(schedule, costs, measured=by_stages + 0.08, host=0.03)
    assert shares.schedule == pytest.approx(1 / 9)
    assert shares.imbalance == pytest.approx(by_stages - 1 / 9)
    assert shares.messages == pytest.approx(0.05)
    assert shares.host == pytest.approx(0.03)
    assert shares.sums == 0.0
    beside = idle_shares(schedule, costs, measured=by_stages + 0.08, host=0.03, sums=0.02)
    assert (beside.messages, beside.host, beside.sums) == pytest.approx((0.05, 0.01, 0.02))
    for measured, host in ((0.5, 0.4), (0.05, 0.0), (by_stages, 0.2)):
        shares = idle_shares(schedule, costs, measured, host, sums=host / 2)
        assert sum(shares) == pytest.approx(measured)
        assert shares.messages >= 0


def test_the_closing_line_says_where_a_difference_went() -> None:
    shares = IdleShares(0.111, 0.203, 0.04, 0.012, 0.0)
    line = closing_line(10, 1.0, 80, 0.111, 0.366, shares)
    assert line.endswith(
        "bubble measured 36.6 %, predicted 11.1 %; measured are 11.1 % by the schedule, "
        "20.3 % imbalance of the stages, 4.0 % waiting for messages, 1.2 % host work"
    )
    summed = closing_line(10, 1.0, 80, 0.111, 0.366, shares._replace(sums=0.1))
    assert summed == f"{line}, 10.0 % sums of gradients"
    assert "imbalance" not in closing_line(10, 1.0, 80, 0.111, 0.115, shares)
    assert "imbalance" not in closing_line(10, 1.0, 80, None, 0.115, shares)


def test_a_plan_with_measured_costs_counts_activations_and_unequal_stages() -> None:
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    layers = without_times(net, find_layers(net)).layers
    forward = (1.0, 1.0, 3.0, 3.0)
    costs = SizeCosts(forward, tuple(2 * each for each in forward), forward, (1000.0,) * 4, (0.0,) * 4)
    profile = CostProfile("Sequential", layers, {1: costs})
    plain, measured = (plan(net, 2, batch=8, micro_batches=8, balance=[2, 2], profile=each) for each in (None, profile))
    assert plain.bubble == pytest.approx(1 / 9)
    # stage 1 is three times as slow: 8 x 18 seconds of work, and stage 0 before and after it
    assert measured.bubble == pytest.approx(1 - 8 * (6 + 18) / (2 * (8 * 18 + 6)))
    # 1F1B holds two micro-batches on the first stage and one on the last, each of two layers
    assert [b.bytes - a.bytes for a, b in zip(plain.stages, measured.stages, strict=True)] == [4000, 2000]
    balanced = plan(net, 2, batch=8, balance="time", profile=profile)
    assert [len(stage.layers) for stage in balanced.stages] == [3, 1]
    with pytest.raises(ConfigurationError, match="has not been measured"):
        plan(net, 2, batch=8, balance="time")
    with pytest.raises(ConfigurationError, match="of another module"):
        plan(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), 2, batch=8, profile=profile)


def test_a_rank_never_holds_the_most_of_all_its_stages_at_once() -> None:
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    costs = SizeCosts((1.0,) * 4, (2.0,) * 4, (1.0,) * 4, (1e6,) * 4, (0.0,) * 4)
    profile = CostProfile("Sequential", without_times(net, find_layers(net)).layers, {1: costs})
    found = plan(net, 2, batch=8, micro_batches=8, schedule="interleaved", profile=profile)
    # 1F1B with two stages on a rank holds five micro-batches on rank 0 and three on rank 1
    held = (5e6 + 16 * 144, 3e6 + 16 * 144)
    own = plan(net, 2, batch=8, micro_batches=8, schedule="interleaved")
    assert [one.step for one in own.memory] == [16 * 144, 16 * 144]
    assert [one.step for one in found.memory] == list(held)[::-1]  # process 0 has the loss
    text = " ".join(str(found).split())
    assert f"rank 0: {memory(held[1])} from the first step on" in text
