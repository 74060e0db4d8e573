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
        return [float(own.grad), float(tied.grad)], [group.members for group in groups.shared]  # type: ignore[arg-type]

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
