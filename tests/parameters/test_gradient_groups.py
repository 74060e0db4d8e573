"""Whose gradients are summed with whose."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.parameters.gradient_sync import GradientSync, Held
from lightning_pipe.partition import find_layers
from lightning_pipe.schedules import Family
from lightning_pipe.transport.topology import Topology
from tests.support.asynchronous_engine import Net, batches
from tests.support.engine_runs import split
from tests.support.pairs import slow_but
from tests.support.threads import ThreadTransport, run_threads, thread_world


def test_gradients_are_summed_over_replicas_and_over_ranks_that_share() -> None:
    def run(transport: ThreadTransport) -> tuple[list[float], list[tuple[int, ...]]]:
        own, tied, alone = (nn.Parameter(torch.zeros(1)) for _ in range(3))
        rank = transport.rank
        transport.make_groups([(0, 2), (1, 3)])
        groups = GradientSync(transport)
        held: list[Held] = [
            (own, (rank,), rank),
            (tied, (0, 1), None),
            (alone, (0, 1), None),
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


def test_sums_go_to_who_updates() -> None:
    def run(transport: ThreadTransport) -> tuple[list[bool], tuple[int, ...], list[bool]]:
        own, alone, tied = (nn.Parameter(torch.ones(size)) for size in (3, 1, 2))
        transport.make_groups([(0, 2), (1, 3)])
        groups = GradientSync(transport)
        groups.scattered = True
        assert groups.counts(own, first=True)  # as long as nobody knows who updates
        assert groups.members_with_all == tuple(sorted(transport.topology.pipeline_processes(transport.replica)))
        rank = transport.rank
        held: list[Held] = [
            (own, (rank,), rank),
            (tied, (0, 1), None),
            (alone, (rank,), rank),
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


def folded(gradients: Sequence[Tensor]) -> Tensor:
    """Each rounded to bfloat16, and each sum of two, in their order."""
    first, *rest = (gradient.bfloat16() for gradient in gradients)
    for gradient in rest:
        first = (first.float() + gradient.float()).bfloat16()
    return first.float()


Summed = list[dict[str, Tensor]]


def summed_in_sixteen_bits(
    transport: ThreadTransport, net: nn.Module, family: Family, scattered: bool
) -> tuple[Summed, dict[str, tuple[int, ...]]]:
    """For each update the gradients of this process, and for each parameter its holders."""
    pipeline = Pipeline(net, find_layers(net, "layers"), [2, 2], family, transport)
    pipeline.partition()
    pipeline.reductions.dtype = torch.bfloat16
    pipeline.reductions.scattered = scattered
    summed, size = [], 4 if pipeline.asynchronous is None else pipeline.asynchronous.stream.micro_batches
    for number, batch in enumerate(batches(3)):
        parts, shares = split(batch, size)
        weights = [(1 + transport.replica) * share for share in shares]
        if pipeline.asynchronous is None:
            pipeline.train(lambda _, part: net(**part), parts, weights, seed=number)
        elif not pipeline.asynchronous.advance(lambda _, part: net(**part), parts, weights, seed=number).update:
            continue
        summed.append({n: p.grad.clone() for n, p in pipeline.local_parameters() if p.grad is not None})
        net.zero_grad()
    assert pipeline.reductions.shards is not None
    members = {id(p): group.members for group in pipeline.reductions.shards.groups for p in group.parameters}
    return summed, {name: members[id(p)] for name, p in pipeline.local_parameters()}


@pytest.mark.parametrize(
    ("schedule", "scattered"),
    slow_but(
        [*product(("1f1b", "chimera", "gems"), (False, True)), ("pipedream", False), ("pipedream_2bw", False)],
        *(("1f1b", False), ("chimera", True), ("pipedream_2bw", False)),
    ),
)
def test_every_schedule_rounds_sums_in_bfloat16_as_said(
    schedule: str, scattered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages that have two ranks, replicas, and batches in flight; weights stay as they are."""
    family, net = schedules.get(schedule), Net(depth=4)
    topology = Topology(2, 2, loss_rank=family.build(2, 4).loss_ranks[0])
    nets = [copy.deepcopy(net) for _ in range(topology.world_size)]
    names = {id(parameter): name for each in nets for name, parameter in each.named_parameters()}
    own: list[dict[str, list[Tensor]]] = [{name: [] for name, _ in net.named_parameters()} for _ in nets]
    begin = GradientSync._begin

    def noted(self: GradientSync, entry: Any) -> None:
        for parameter in entry.parameters:
            own[self._transport.process][names[id(parameter)]].append(parameter.grad.clone())
        begin(self, entry)

    monkeypatch.setattr(GradientSync, "_begin", noted)
    found = run_threads(thread_world(topology), lambda t: summed_in_sixteen_bits(t, nets[t.process], family, scattered))
    kept: list[float] = []
    for process, (summed, holders) in enumerate(found):
        for update, gradients in enumerate(summed):
            for name, gradient in gradients.items():
                given = [own[member][name][update] for member in holders[name]]
                assert torch.equal(gradient, folded(given)), (process, name, update)
                kept.append(1 if scattered else 1 / len(given))
    # the sum of each parameter is on one of its holders, or on all of them
    updates = sum(len(summed) for summed, _ in found) / len(found)
    assert sum(kept) == len(names) / len(nets) * updates
