"""The facts of a division, without a run."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_pipe import schedules
from lightning_pipe.engine.partitioned_module import PartitionedModule
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import PartitionError
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.topology import Topology
from tests.support.threads import ThreadTransport, run_threads, thread_world

WEIGHTS = ("weight", "bias")


def divided(schedule: str, balance: list[int], ranks: int = 2, replicas: int = 1) -> list[PartitionedModule]:
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    family = schedules.get(schedule)
    topology = Topology(ranks, replicas)
    return [PartitionedModule(module, find_layers(module), balance, family, each) for each in thread_world(topology)]


def test_stages_are_ranges_of_layers_on_their_ranks() -> None:
    first, last = divided("1f1b", [1, 3])
    assert first.stage_layers == [range(1), range(1, 4)]
    assert (list(first.stages_here), list(last.stages_here)) == ([0], [1])
    assert (first.is_loss_rank, last.is_loss_rank) == (False, True)
    assert (first.loss_ranks, last.loss_ranks) == ((1,), (1,))
    assert [name for name, _ in last.local_parameters()] == [f"{n}.{part}" for n in (1, 2, 3) for part in WEIGHTS]


def test_the_same_rank_of_every_replica_holds_the_same_names() -> None:
    every = divided("gpipe", [2, 2], replicas=2)
    assert [each.pipeline_members for each in every] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert all(each.owners("0.weight") == (0,) for each in every)


def test_both_holders_of_a_stage_with_twins_hold_its_parameters() -> None:
    first, last = divided("chimera", [2, 2])
    assert first.holders(0) == last.holders(1) == (0, 1)
    assert [stage for *_, stage in first.held_parameters()] == [0] * 4 + [1] * 4


def test_ranks_with_the_same_stages_use_the_same_parameters() -> None:
    def run(transport: ThreadTransport) -> list[tuple[int, ...]]:
        module = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("embed", "one", "two", "head")})
        layers = [(name, module[name]) for name in ("one", "two")]
        own = Pipeline(module, layers, [1, 1], schedules.PipeDream(replicas=(2, 1)), transport)
        assert [own.holders(stage) for stage in range(2)] == [(0, 1), (2,)]
        own.ownership.used |= {0: {"embed.weight"}, 2: {"head.weight"}}.get(transport.rank, set())
        own.agree_on_holders()
        return [own.owners(f"{name}.weight") for name in module]

    assert run_threads(thread_world(Topology(3, loss_rank=2)), run) == [[(0, 1), (0, 1), (2,), (2,)]] * 3


def test_a_balance_that_leaves_layers_over_is_refused() -> None:
    with pytest.raises(PartitionError, match="adds up to 3; there are 4 layers"):
        divided("1f1b", [1, 2])
