"""What the transport between threads does besides what all transports do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_pipe.errors import CommunicationError
from lightning_pipe.transport.topology import Topology
from tests.support.threads import ThreadTransport, run_threads, thread_world
from tests.transport.test_transports import FORWARD, get, message


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
