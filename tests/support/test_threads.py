"""What the transport between threads does besides what all transports do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_pipe.errors import CommunicationError
from lightning_pipe.transport.topology import Topology
from tests.support.threads import ThreadTransport, run_threads, thread_world
from tests.transport.test_transports import BACKWARD, FORWARD, get, message


def test_the_first_error_is_raised_and_the_others_stop() -> None:
    stopped = []

    def fn(transport: ThreadTransport) -> None:
        if transport.rank == 2:
            raise ValueError("own error")
        try:
            transport.barrier()
        except CommunicationError as error:
            stopped.append(str(error))
            raise

    start = time.monotonic()
    with pytest.raises(ValueError, match="own error"):
        run_threads(thread_world(Topology(4)), fn)
    assert time.monotonic() - start < 2
    assert len(stopped) == 3
    assert "rank 2 failed with ValueError: own error" in stopped[0]


def test_who_comes_after_a_failure_does_not_wait() -> None:
    first, second = thread_world(Topology(2))
    first.world.fail(first.process, ValueError("own error"))
    start = time.monotonic()
    with pytest.raises(CommunicationError, match=r"could not receive 3 bytes .*failed with ValueError: own error"):
        get(second, 3, first.rank, FORWARD)
    assert time.monotonic() - start < 2


def test_a_hang_ends_with_a_report() -> None:
    def fn(transport: ThreadTransport) -> None:
        if transport.rank == 0:
            time.sleep(1.0)
        else:
            get(transport, 3, 0, BACKWARD)

    with pytest.raises(CommunicationError, match=r"Not done within 0.3 s(.|\n)*rank 0: computes(.|\n)*rank 1: waits"):
        run_threads(thread_world(Topology(2)), fn, timeout=0.3)


def test_sizes_that_differ_raise() -> None:
    def fn(transport: ThreadTransport) -> None:
        if transport.rank == 0:
            transport.send(message(1, 3), 1, FORWARD).wait()
        else:
            get(transport, 4, 0, FORWARD)

    with pytest.raises(CommunicationError, match="3 bytes were sent, 4 expected"):
        run_threads(thread_world(Topology(2)), fn)


MISMATCHES: dict[str, list[Callable[[ThreadTransport], Any]]] = {
    "size": [
        lambda transport: transport.broadcast(torch.zeros(2), 0, (0, 1)),
        lambda transport: transport.broadcast(torch.zeros(4), 0, (0, 1)),
    ],
    "root": [
        lambda transport: transport.broadcast(torch.zeros(2), 0, (0, 1)),
        lambda transport: transport.broadcast(torch.zeros(2), 1, (0, 1)),
    ],
    "kind": [
        lambda transport: transport.broadcast(torch.zeros(2), 0, (0, 1)),
        lambda transport: transport.all_reduce(torch.zeros(2), (0, 1)),
    ],
    "type": [
        lambda transport: transport.all_reduce(torch.zeros(2), (0, 1)),
        lambda transport: transport.all_reduce(torch.zeros(1, dtype=torch.float64), (0, 1)),
    ],
    "shares": [
        lambda transport: transport.reduce_scatter([torch.zeros(2), torch.zeros(1)], (0, 1)),
        lambda transport: transport.reduce_scatter([torch.zeros(1), torch.zeros(2)], (0, 1)),
    ],
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_collectives_that_differ_raise(name: str) -> None:
    """A copy would write beyond the smaller of two tensors, or what the other member does not expect."""
    with pytest.raises(CommunicationError, match="the ranks disagree"):
        run_threads(thread_world(Topology(2)), lambda transport: MISMATCHES[name][transport.process](transport).wait())


def test_one_process_needs_no_peer() -> None:
    def fn(transport: ThreadTransport) -> tuple[float, Any]:
        tensor = torch.ones(1)
        transport.all_reduce(tensor, (0,)).wait()
        transport.barrier()
        return float(tensor), transport.all_gather_object("x", (0,))

    assert run_threads(thread_world(Topology(1)), fn) == [(1.0, ["x"])]
