"""Connects the processes that run on the same host."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
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
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.settimeout(timeout)
        folder, address = _listen(listener, len(everyone))
        try:
            places = gather((_host(), address))
            connections: dict[int, socket.socket] = {}
            for peer in everyone:
                # the lower process of each pair connects, so that a pair has one connection
                if peer > process and address and places[peer][0] == places[process][0]:
                    connection = _reach(places[peer][1], process)
                    if connection is not None:
                        connections[peer] = connection
            # a process that could not be reached must not be waited for: both ends then use Gloo
            reached = gather(sorted(connections))
            awaited = {peer for peer in everyone if peer < process and process in reached[peer]}
            while awaited:
                connection, _ = listener.accept()
                connection.settimeout(timeout)
                peer = int.from_bytes(connection.recv(8), "little")
                awaited.discard(peer)
                connections[peer] = connection
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return {peer: SharedMemoryPeer(connection, timeout) for peer, connection in connections.items()}


def _listen(listener: socket.socket, others: int) -> tuple[str, str]:
    """Listen in a folder that nobody else can enter; returns it and the address, empty where that is impossible."""
    folder = ""
    try:
        os.close(os.memfd_create("lightning-pipe"))  # raises where the system has no such files
        folder = tempfile.mkdtemp(prefix="lightning-pipe-")
        address = str(Path(folder) / "socket")
        listener.bind(address)
        listener.listen(others)
    except (AttributeError, OSError):
        return folder, ""
    return folder, address


def _host() -> str:
    """A name of this host: equal on all its processes, and on no other host."""
    try:
        # containers of one host have names of their own, and the same kernel
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()


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
