"""Whose gradients are summed with whose."""

from __future__ import annotations

import torch
from torch import nn

from lightning_pipe.parameters.gradient_groups import GradientGroups, HeldParameter, uses_of_ranks
from lightning_pipe.transport.threads import ThreadTransport, run_threads, thread_world
from lightning_pipe.transport.topology import Topology


def test_gradients_are_summed_over_replicas_and_over_ranks_that_share() -> None:
    def run(transport: ThreadTransport) -> tuple[list[float], list[tuple[int, ...]]]:
        own, tied, alone = (nn.Parameter(torch.zeros(1)) for _ in range(3))
        rank = transport.rank
        transport.make_groups([(0, 2), (1, 3)])
        groups = GradientGroups(transport)
        held = [
            HeldParameter(own, (rank,), rank),
            HeldParameter(tied, (0, 1), None),
            HeldParameter(alone, (0, 1), None),
        ]
        groups.form(held, [rank])
        for parameter in (own, tied):
            parameter.grad = torch.full((1,), 10.0**transport.process)
        groups.overlapped = True
        groups.stage_done(rank)
        groups.finish()
        assert alone.grad is None
        assert groups.shards is not None
        members = [group.members for group in groups.shards.groups]
        return [float(own.grad), float(tied.grad)], members  # type: ignore[arg-type]

    found = run_threads(thread_world(Topology(2, replicas=2)), run)
    everyone = (0, 1, 2, 3)
    assert (
        found
        == [
            ([101.0, 1111.0], [everyone, (0, 2)]),
            ([1010.0, 1111.0], [everyone, (1, 3)]),
        ]
        * 2
    )


def test_ranks_with_the_same_stages_use_the_same_parameters() -> None:
    def run(transport: ThreadTransport) -> list[set[str]]:
        used = {0: {"head"}, 1: {"embed"}, 2: set[str]()}[transport.rank]
        placement = {(0, 0): 1, (0, 1): 0, (1, 1): 2, (1, 0): 1}
        return list(uses_of_ranks(transport, placement, used))

    expected = [{"head"}, {"embed"}, {"head"}]
    assert run_threads(thread_world(Topology(3)), run) == [expected] * 3


def test_sums_go_to_who_updates() -> None:
    def run(transport: ThreadTransport) -> tuple[list[bool], tuple[int, ...], list[bool]]:
        own, alone, tied = (nn.Parameter(torch.ones(size)) for size in (3, 1, 2))
        transport.make_groups([(0, 2), (1, 3)])
        groups = GradientGroups(transport)
        groups.scattered = True
        assert groups.counts(own, first=True)  # as long as nobody knows who updates
        assert groups.members_with_all == (transport.topology.process(transport.replica, 0),) + (
            transport.topology.process(transport.replica, 1),
        )
        rank = transport.rank
        held = [
            HeldParameter(own, (rank,), rank),
            HeldParameter(tied, (0, 1), None),
            HeldParameter(alone, (rank,), rank),
        ]
        groups.form(held, [rank])
        for parameter in (own, tied, alone):
            parameter.grad = torch.ones_like(parameter)
        groups.finish()
        kept = [parameter.grad is not None for parameter in (own, tied, alone)]
        assert all(float(p.grad[0]) == (4 if p is tied else 2) for p in (own, tied, alone) if p.grad is not None)
        return kept, groups.members_with_all, [groups.counts(p, first=False) for p in (own, tied, alone)]

    found = run_threads(thread_world(Topology(2, replicas=2)), run)
    assert all(kept == counted for kept, _, counted in found)
    assert all(members == (0, 1, 2, 3) for _, members, _ in found)
    # each parameter of a stage on one of its two holders, the tied one on one of four
    for one, other in ((0, 2), (1, 3)):
        assert [a + b for a, b in zip(found[one][0][::2], found[other][0][::2], strict=True)] == [1, 1]
    assert sum(kept[1] for kept, _, _ in found) == 1
