"""Every transport's sums, broadcasts and gatherings, over threads, over Gloo, and over shared memory of one host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology
from tests.support.transports import EVERY, Run


def collectives(transport: Transport) -> dict[str, Any]:
    world = tuple(range(4))
    pairs = [(0, 2), (1, 3)]
    transport.make_groups([*pairs, (0,), pairs[0]])
    transport.make_groups(pairs)
    mine = transport.topology.members(0, [0]) and pairs[transport.process % 2]
    results: dict[str, Any] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        for op in ("sum", "max", "min"):
            tensor = torch.tensor([transport.process, 1], dtype=dtype)
            work = transport.all_reduce(tensor, world, op)  # type: ignore[arg-type]
            work.wait()
            results[f"{op} {dtype}"] = tensor.tolist()
    tensor = torch.tensor([transport.process])
    transport.all_reduce(tensor, mine).wait()
    results["pair"] = tensor.item()
    transport.all_reduce(tensor, (transport.process,)).wait()
    tensor = torch.full((3,), transport.process)
    transport.broadcast(tensor, mine[1], mine).wait()
    results["broadcast"] = tensor.tolist()
    results["object"] = transport.broadcast_object({"p": transport.process}, 2, world)
    results["large object"] = len(transport.broadcast_object("x" * 5000 * transport.process, 3, world))
    results["alone"] = transport.broadcast_object("me", transport.process, (transport.process,))
    results["gather"] = transport.all_gather_object("x" * transport.process * 1000, world)
    results["gather pair"] = transport.all_gather_object(transport.process, mine)
    transport.barrier()
    return results


@pytest.mark.parametrize("run", EVERY, indirect=True)
def test_collectives(run: Run) -> None:
    for process, results in enumerate(run(collectives, Topology(2, 2, loss_rank=-1))):
        pair = (process % 2, process % 2 + 2)
        for key, value in results.items():
            if key.startswith(("sum", "max", "min")):
                assert value == {"sum": [6, 4], "max": [3, 1], "min": [0, 1]}[key.split()[0]], key
        assert results["pair"] == sum(pair)
        assert results["broadcast"] == [pair[1]] * 3
        assert results["object"] == {"p": 2}
        assert results["large object"] == 15000
        assert results["alone"] == "me"
        assert results["gather"] == ["x" * 1000 * process for process in range(4)]
        assert results["gather pair"] == list(pair)


def scattered(transport: Transport) -> list[list[float]]:
    """What this process keeps of sums of parts of different sizes, in a world of three and in a pair."""
    world, pair = (0, 1, 2), (0, 2)
    transport.make_groups([pair])
    found = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        parts = [torch.arange(size, dtype=dtype) + transport.process for size in (3, 0, 2)]
        transport.reduce_scatter(parts, world).wait()
        found.append(parts[transport.process].tolist())
    if transport.process in pair:
        parts = [torch.full((1, 2), 1.0 + transport.process, requires_grad=True) for _ in pair]
        transport.reduce_scatter(parts, pair).wait()
        found += parts[pair.index(transport.process)].tolist()
    alone = torch.ones(2)
    transport.reduce_scatter([alone], (transport.process,)).wait()
    return [*found, alone.tolist()]


def test_sums_are_scattered_to_their_members(run: Run) -> None:
    first, second, third = run(scattered, Topology(1, 3))
    assert first == [[3.0, 6.0, 9.0]] * 3 + [[4.0, 4.0], [1.0, 1.0]]
    assert second == [[]] * 3 + [[1.0, 1.0]]
    assert third == [[3.0, 6.0]] * 3 + [[4.0, 4.0], [1.0, 1.0]]


def overlapping(transport: Transport) -> list[float]:
    tensors = [torch.full((1000,), float(i + transport.process)) for i in range(10)]
    works = [transport.all_reduce(tensor, (0, 1)) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    return [float(tensor[0]) for tensor in tensors]


def test_collectives_under_way_together(run: Run) -> None:
    assert run(overlapping, Topology(2)) == [[2.0 * i + 1 for i in range(10)]] * 2
