"""Connects the processes that run on the same host."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lightning_pipe.transport.shared_memory.peer import SharedMemoryPeer


def connect_local(
    process: int, everyone: Sequence[int], timeout: float, gather: Callable[[Any], list[Any]]
) -> dict[int, SharedMemoryPeer]:
    """Connect the processes that run on the same host. Collective over the world.

    Args:
        process: this process.
        everyone: the processes of the world.
        timeout: the longest that the other end may take, here and in every receive, in seconds.
        gather: gathers an object from all processes, by process.

    Returns:
        The connections, by process. Processes on other hosts, and those that cannot be reached (in another container,
        on a system without the means), are left out at both ends.

    Raises:
        OSError: a process that had come did not finish.
    """
    connections: dict[int, socket.socket] = {}
    with (
        # which nobody else can enter; its name exists on no other host
        tempfile.TemporaryDirectory(prefix="lightning-pipe-", ignore_cleanup_errors=True) as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        listener.settimeout(timeout)
        addresses = gather(_listen(listener, f"{folder}/socket", len(everyone)))
        # the lower process of each pair connects, so that a pair has one connection
        for peer in everyone[process + 1 :] if addresses[process] else ():
            if (connection := _reach(addresses[peer], process)) is not None:
                connections[peer] = connection
        # a process that could not be reached must not be waited for: both ends then use Gloo
        reached = gather(sorted(connections))
        for _ in [peer for peer in everyone[:process] if process in reached[peer]]:
            connection, _ = listener.accept()
            connection.settimeout(timeout)
            connections[int.from_bytes(connection.recv(8), "little")] = connection
    return {peer: SharedMemoryPeer(connection, timeout) for peer, connection in connections.items()}


def _listen(listener: socket.socket, address: str, others: int) -> str:
    """Listen at an address; returns it, or an empty one where the system has not the means."""
    with suppress(AttributeError, OSError):
        os.close(os.memfd_create("lightning-pipe"))
        listener.bind(address)
        listener.listen(others)
        return address
    return ""


def _reach(address: str, process: int) -> socket.socket | None:
    """A connection to a listener, introduced by this process's number."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
        connection.send(process.to_bytes(8, "little"))
    except OSError:
        connection.close()
        return None
    return connection
