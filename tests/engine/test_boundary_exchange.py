"""One boundary between two ranks: everything the first time, what is used from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.engine.boundary_exchange import BoundaryExchange, BoundaryKey
from lightning_pipe.intercept.call_record import LEAF, CallRecord, LiveTensor, RunRecord, Value
from lightning_pipe.intercept.crossing import Crossing, Returned
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.transport.base import Channel, Lane
from lightning_pipe.transport.topology import Topology
from tests.support.threads import ThreadTransport, run_threads, thread_world

KEY = BoundaryKey(0, 0, 0, 1)


def crossing(layer: str, *tensors: Tensor) -> Crossing:
    entries = tuple(LiveTensor(n, TensorSpec.of(each), each.requires_grad, False) for n, each in enumerate(tensors))
    return Crossing(RunRecord((CallRecord(layer, (0,), (True,)),), entries), dict(enumerate(tensors)), (7,))


def over_a_boundary(batches: list[Crossing], used: frozenset[int]) -> list[list[Any]]:
    """What one rank gets back, and what the other one gets, when it uses some of the tensors."""

    def first(exchange: BoundaryExchange) -> list[Any]:
        found: list[Any] = []
        for batch in batches:
            exchange.set_out(0, "shape")
            exchange.send(KEY, 1, batch)
            exchange.expect_gradients(KEY, 1)
            found.append(exchange.receive_gradients(KEY, 1))
            exchange.end()
        return found

    def second(exchange: BoundaryExchange) -> list[Any]:
        found: list[Any] = []
        for _ in batches:
            exchange.set_out(0, "shape")
            exchange.expect(KEY, 0)
            found.append(exchange.receive(KEY, 0))
            gradients = {number: torch.ones(2) * 3 for number in used & set(found[-1].differentiable)}
            exchange.send_gradients(KEY, 0, Returned(gradients, used))
            exchange.end()
        return found

    bodies: list[Callable[[BoundaryExchange], list[Any]]] = [first, second]

    return on_both_ends(lambda exchange: bodies[exchange.transport.rank](exchange))


def sent_by(exchange: BoundaryExchange) -> int:
    """The bytes of this end's messages whose size both ends had agreed on."""
    assert isinstance(exchange.transport, ThreadTransport)
    return exchange.transport.sent


def on_both_ends(body: Callable[[BoundaryExchange], list[Any]]) -> list[list[Any]]:
    """What two ranks return."""

    def run(transport: ThreadTransport) -> list[Any]:
        lanes = (Channel(0, 1, Lane("forward", 0)), Channel(1, 0, Lane("backward", 0)))
        transport.connect(dict.fromkeys(lanes))
        return body(BoundaryExchange(transport))

    return run_threads(thread_world(Topology(2)), run)


def test_only_tensors_that_are_used_and_single_numbers_travel_from_the_second_batch_on() -> None:
    h, mask, loss = torch.ones(2, requires_grad=True) * 2, torch.zeros(2), torch.tensor(5.0)
    back, came = over_a_boundary([crossing("a", h, mask, loss)] * 2, frozenset({0}))
    assert [sorted(each.tensors) for each in came] == [[0, 1, 2], [0, 2]]
    assert all(torch.equal(each.tensors[0], h) and not each.tensors[0].requires_grad for each in came)
    assert [each.gradients[0].tolist() for each in back] == [[3, 3], [3, 3]]
    assert [each.used for each in back] == [{0}, {0}]


def test_what_has_set_out_keeps_the_plans_that_it_has() -> None:
    def body(exchange: BoundaryExchange) -> list[int]:
        sent = []
        for number in (0, 1):
            exchange.set_out(number, "shape")
        for number in range(3):
            key = KEY._replace(micro_batch=number)
            if exchange.transport.rank == 0:
                exchange.send(key, 1, crossing("a", torch.ones(2)))
                exchange.receive_gradients(key, 1)
            else:
                exchange.expect(key, 0)
                exchange.receive(key, 0)
                exchange.send_gradients(key, 0, Returned({}, frozenset()))
            sent.append(sent_by(exchange))
            if number == 0:
                exchange.end((0,))
                exchange.set_out(2, "shape")
        exchange.end()
        return sent

    first, _ = on_both_ends(body)
    assert first[0] == first[1] == 0 < first[2]


def test_what_the_code_reads_travels_beside_the_agreed_message() -> None:
    def reading(value: float, layer: str = "a") -> Crossing:
        read = CallRecord("item", (), (), LEAF, (Value.of(value),))
        made = crossing(layer, torch.ones(2) * value)
        return Crossing(RunRecord((read, *made.path.calls), made.path.entries), made.tensors, (7, 7))

    def body(exchange: BoundaryExchange) -> list[Any]:
        found: list[Any] = []
        send_object = exchange.transport.send_object

        def sending(obj: Any, *args: Any) -> Any:
            objects.append(obj)
            return send_object(obj, *args)

        exchange.transport.send_object = sending  # type: ignore[method-assign]
        for batch in (reading(1.0), reading(2.0), reading(3.0, "b")):
            exchange.set_out(0, "shape")
            if exchange.transport.rank == 0:
                exchange.send(KEY, 1, batch)
                exchange.receive_gradients(KEY, 1)
            else:
                exchange.expect(KEY, 0)
                came = exchange.receive(KEY, 0)
                found.append((came.path.calls == batch.path.calls, came.tensors[0].tolist(), came.words))
                exchange.send_gradients(KEY, 0, Returned({}, frozenset({0})))
            found.append(sent_by(exchange))
            exchange.end()
        return found

    objects = list[Any]()
    first, second = on_both_ends(body)
    assert first == [0, first[1], 2 * first[1]]  # the first time there is no agreed message
    assert objects[1] == [Value.of(2.0)]
    assert [type(each) for each in objects] == [tuple, list, tuple]  # on another path everything goes as in the first
    assert second[::2] == [(True, [1.0] * 2, (7, 7)), (True, [2.0] * 2, (7, 7)), (True, [3.0] * 2, (7, 7))]
