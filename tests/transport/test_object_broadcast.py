"""Objects from one process to the others."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from lightning_pipe.transport.object_broadcast import broadcast
from lightning_pipe.transport.threads import ThreadTransport, run_threads, thread_world
from lightning_pipe.transport.topology import Topology

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: Any


SHARED = torch.arange(3)
OBJECTS = {
    "none": None,
    "text": "text" * 3000,
    "numbers": {"a": 1, "b": [2.5, True, None], "c": (3 + 2j, b"bytes")},
    "tensors": {"x": torch.randn(3, 4), "y": torch.arange(5), "z": torch.tensor(1.5, dtype=torch.bfloat16)},
    "kinds": [torch.tensor([True, False]), torch.empty(0, 3), torch.randn(2, dtype=torch.complex64), torch.tensor(7)],
    "strided": torch.randn(4, 6).t()[1:4, ::2],
    "column of one row": [torch.randn(1, 2)[:, 1], torch.randn(3, 1, 600 * 600)[::2, :, 1], torch.randn(1, 3).t()],
    "no rows": [torch.randn(0, 3)[:, 1], torch.randn(4, 6)[::2, 2:2]],
    "bits": [torch.randn(3, dtype=torch.complex64).conj(), torch.randn(3, dtype=torch.complex64).conj().imag],
    "zeros without memory": torch._efficientzerotensor(3),
    "spread": [torch.ones(1).expand(3, 2), torch.arange(6).as_strided((3, 2), (1, 1)), torch.tensor(4).expand(1)],
    "large": {"small": torch.arange(10), "large": torch.randn(600, 600), "other": torch.randn(700, 500)},
    "many": [torch.full((100,), i) for i in range(50)],
    "types": Pair(Record(torch.randn(2)), BatchEncoding({"ids": torch.arange(6).view(2, 3)})),
    "array": np.arange(5),
    "twice": [SHARED, SHARED],
}


def same(one: Any, other: Any) -> bool:
    """Equal in types, values, dtypes and shapes."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool((one == other).all())
    if isinstance(one, Record):
        return same(one.x, other.x)
    if isinstance(one, dict | BatchEncoding):
        return type(one) is type(other) and all(same(one[key], other[key]) for key in one.keys() | other.keys())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("name", OBJECTS)
def test_arrives_as_it_was(name: str) -> None:
    topology = Topology(ranks=3)
    members = (0, 1, 2)

    def run(transport: ThreadTransport) -> Any:
        transport.make_groups([members])
        return broadcast(transport, OBJECTS[name] if transport.process == 1 else None, 1, members)

    received = run_threads(thread_world(topology), run)
    assert received[1] is OBJECTS[name]
    assert all(same(OBJECTS[name], each) for each in received)


def test_one_object_twice_is_one_object() -> None:
    def run(transport: ThreadTransport) -> Any:
        return broadcast(transport, OBJECTS["twice"] if transport.process == 0 else None, 0, (0, 1))

    _, received = run_threads(thread_world(Topology(ranks=2)), run)
    assert received[0] is received[1]


def test_one_process_gets_its_own_object() -> None:
    (transport,) = thread_world(Topology(ranks=1))
    assert broadcast(transport, SHARED, 0, (0,)) is SHARED


def test_graphs_stay_behind() -> None:
    def run(transport: ThreadTransport) -> Any:
        weight = torch.ones(2, requires_grad=True)
        return broadcast(transport, weight * 2 if transport.process == 0 else None, 0, (0, 1))

    _, received = run_threads(thread_world(Topology(ranks=2)), run)
    assert received.grad_fn is None
