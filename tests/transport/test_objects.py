"""Objects travel from one process to others by every operation of a transport, in one encoding."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from lightning_pipe.transport.objects import FIRST, LARGE, decode, encode
from lightning_pipe.transport.topology import Topology
from tests.support.threads import ThreadTransport, run_threads, thread_world

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
    "large arrays": [np.zeros((300, 400)), np.asfortranarray(np.ones((200, 300))), np.arange(90_000)[::2]],
    "more large ones than the first message names": [
        torch.full((LARGE,), i % 256, dtype=torch.uint8) for i in range(600)
    ],
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


MEMBERS = (0, 1, 2)
CPU = torch.device("cpu")


def copy_of(obj: Any, *, by_reference: bool = False) -> Any:
    """What a receiver makes of the messages of an object."""
    messages = iter(encode(obj, by_reference=by_reference))
    return decode(lambda message: message.copy_(next(messages)), CPU)


def test_each_arrives_as_it_was() -> None:
    def moved(transport: ThreadTransport, obj: Any) -> list[Any]:
        mine = obj if transport.process == 1 else None
        found = [transport.broadcast_object(mine, 1, MEMBERS), transport.all_gather_object(mine, MEMBERS)[1]]
        if transport.process == 1:
            for work in [transport.send_object(obj, peer, 7) for peer in (0, 2)]:
                work.wait()
            return found
        return [*found, transport.receive_object(1, 7)]

    def run(transport: ThreadTransport) -> dict[str, list[Any]]:
        transport.make_groups([MEMBERS])
        return {name: moved(transport, obj) for name, obj in OBJECTS.items()}

    received = run_threads(thread_world(Topology(ranks=3)), run)
    for name, obj in OBJECTS.items():
        of_name = [found[name] for found in received]
        assert of_name[1][0] is obj, name
        assert [len(each) for each in of_name] == [3, 2, 3], name
        assert all(same(obj, each) for found in of_name for each in found), name


@pytest.mark.parametrize("by_reference", [False, True])
def test_strides_without_gaps_are_kept(by_reference: bool) -> None:
    image = torch.randn(2, 3, 400, 300).to(memory_format=torch.channels_last)
    dense = [image, image[:, :1, :5], torch.randn(4, 6).t(), torch.randn(700, 500, dtype=torch.complex64).t().conj()]
    copies = copy_of(dense, by_reference=by_reference)
    assert [same(one, other) for one, other in zip(dense, copies, strict=True)] == [True] * 4
    assert [copies[number].stride() for number in (0, 2, 3)] == [image.stride(), (1, 6), (1, 500)]
    assert copies[1].is_contiguous()  # the original has gaps


def test_large_tensors_are_sent_out_of_their_own_memory() -> None:
    large = {
        "rows": torch.zeros(LARGE // 4),
        "columns": torch.zeros(700, 500).t(),
        "array": np.zeros(LARGE // 8),
        "small": torch.zeros(LARGE // 4 - 1),
    }
    first, second, *separate = encode(large, by_reference=True)
    assert first.numel() + second.numel() < LARGE + FIRST
    addresses = [large["rows"].data_ptr(), large["columns"].data_ptr(), large["array"].ctypes.data]
    assert [message.data_ptr() for message in separate] == addresses
    _, _, *copies = encode(large)
    assert len(copies) == 3
    assert not {message.data_ptr() for message in copies} & set(addresses)


def test_what_is_sent_may_be_changed_at_once() -> None:
    def run(transport: ThreadTransport) -> Any:
        if transport.process == 1:
            return transport.receive_object(0, 0)
        tensor = torch.ones(LARGE)
        work = transport.send_object(tensor, 1, 0)
        tensor.zero_()
        return work.wait()

    _, received = run_threads(thread_world(Topology(ranks=2)), run)
    assert bool((received == 1).all())


def test_small_objects_are_one_message() -> None:
    assert [each.numel() for each in encode({"loss": torch.tensor(1.0), "names": ["a", "b"]})] == [FIRST]
    assert len(encode("x" * FIRST)) == 2


def test_one_object_twice_is_one_object() -> None:
    received = copy_of(OBJECTS["twice"])
    assert received[0] is received[1]


def test_a_small_tensor_does_not_keep_its_message() -> None:
    copies = copy_of([torch.ones(2), torch.ones(LARGE)])
    assert [each.untyped_storage().nbytes() for each in copies] == [8, 4 * LARGE]


def test_graphs_stay_behind() -> None:
    weight = torch.ones(2, requires_grad=True)
    received = copy_of([weight * 2, weight, weight.detach(), torch.nn.Parameter(weight)])
    assert [each.grad_fn for each in received] == [None] * 4
    assert [each.requires_grad for each in received] == [True, True, False, True]
    assert type(received[3]) is torch.nn.Parameter
