"""Connects the processes of a run, and keeps processes of other runs out.

On one host nobody from outside can: the store and Gloo listen on the loopback interface alone. Between hosts there is
no password: whoever reaches the port of the store can end a run, so the network must be one that is trusted. The keys
of a run stand behind its own prefix, so that a process of another run that comes by mistake changes nothing.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lightning_pipe.errors import CommunicationError, ConfigurationError
from lightning_pipe.lightning_internals import connect_processes

RUN = "LIGHTNING_PIPE_RUN"
"""The variable with the name of a run, the same in all its processes and different in all other runs."""

_LOOPBACK = "127.0.0.1"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_GLANCE = 0.1


def connect(environment: ClusterEnvironment, backend: str, timeout: timedelta, hosts: int) -> None:
    """Initialise torch.distributed, unless the user has. Collective.

    Args:
        environment: how the processes find each other.
        backend: torch.distributed's.
        timeout: how long they wait for the last one.
        hosts: on how many hosts they are.

    Raises:
        ConfigurationError: the port is taken; the hosts would not reach each other.
        CommunicationError: a process has not come in time.
    """
    if dist.is_initialized():
        return
    meeting = _Meeting(environment.global_rank(), environment.world_size(), timeout)
    started = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun serves a store, one for all attempts
    address = _LOOPBACK if hosts == 1 and not started else environment.main_address
    if meeting.process > 0 or started:
        store = _find(address, environment.main_port, meeting)
    else:
        store = _serve(address if hosts == 1 else "", environment.main_port, meeting)
    store = PrefixStore(f"lightning_pipe/{_run_name()}", store)
    store = PrefixStore(meeting.attempt(store), store)
    connect_processes(environment, backend, timeout=timeout, store=store)


def listen_on_loopback() -> None:
    """Let Gloo listen on the loopback interface alone, in groups of the user's too, unless the user says otherwise."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault(_INTERFACE, loopback)


class _Meeting:
    """One process, waiting for the others.

    Args:
        process: its number.
        size: of the world.
        timeout: how long it waits.
    """

    def __init__(self, process: int, size: int, timeout: timedelta) -> None:
        self.process, self.size, self.timeout = process, size, timeout
        self._deadline = time.monotonic() + timeout.total_seconds()

    def wait_a_moment(self) -> bool:
        """Whether there is time left."""
        time.sleep(_GLANCE)
        return time.monotonic() < self._deadline

    def attempt(self, store: Store) -> str:
        """Return when all processes have come to the store, and know that they can reach each other.

        After a restart ``torchrun`` goes on with the store of the attempt before, with the addresses of processes that
        have gone (torch 2.13), and its count of restarts differs between nodes: a node whose workers have not failed
        does not count. So process 0 makes a name, and it holds for those who find themselves in process 0's list::

            process 0                                  process n
            attempt = name                             reads a name, perhaps that of the last attempt
            waits for name/here/1, name/here/2, …      name/here/n = an identity of its own, its host and address
            name/all = what they have said             waits for name/all with its own words, or for another name

        Returns:
            The name, which no other attempt in the same store has.
        """
        mine = json.dumps([uuid.uuid4().hex, socket.gethostname(), _gloo_address()])
        if self.process == 0:
            name = uuid.uuid4().hex
            store.set("attempt", name)
            while missing := self._away(store, name):
                if not self.wait_a_moment():
                    raise self._missing(missing)
            come = [mine, *(store.get(f"{name}/here/{number}").decode() for number in range(1, self.size))]
            store.set(f"{name}/all", json.dumps(come))
        else:
            name, come = self._join_attempt(store, mine)
        _check_addresses([(host, address) for _, host, address in map(json.loads, come)])
        return name

    def _away(self, store: Store, name: str) -> list[int]:
        return [number for number in range(1, self.size) if not store.check([f"{name}/here/{number}"])]

    def _join_attempt(self, store: Store, mine: str) -> tuple[str, list[str]]:
        name = ""
        while True:
            if store.check(["attempt"]):
                name = store.get("attempt").decode()
                store.set(f"{name}/here/{self.process}", mine)
                if store.check([f"{name}/all"]) and mine in (come := json.loads(store.get(f"{name}/all"))):
                    return name, come
            if not self.wait_a_moment():
                raise self._missing((name and self._away(store, name)) or [0])

    def _missing(self, processes: list[int]) -> CommunicationError:
        return CommunicationError(
            f"Process {self.process} of {self.size} has waited {self.timeout.total_seconds():g} s for "
            f"process {', '.join(map(str, processes))}.",
            hint="Look for their errors, or for why they have not started; a longer time is PipeStrategy(timeout=…).",
        )


def _serve(address: str, port: int, meeting: _Meeting) -> Store:
    """The store, served by this process.

    Raises:
        ConfigurationError: the port is taken.
    """
    try:
        if address or not socket.has_dualstack_ipv6():
            listener = socket.create_server((address, port), backlog=1024)
        else:
            listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ConfigurationError(
            f"Port {port}, at which the processes were to meet, is taken by another program on this host.",
            hint="Set MASTER_PORT to another one, or leave it out on one host: then a free one is found.",
        ) from None
    return TCPStore(
        address or "localhost",
        port,
        meeting.size,
        True,
        timeout=meeting.timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _find(address: str, port: int, meeting: _Meeting) -> Store:
    """The store that process 0 serves, once it does."""
    while True:
        try:
            socket.create_connection((address, port), timeout=5.0).close()
        except OSError as error:
            if not meeting.wait_a_moment():
                raise CommunicationError(
                    f"Process {meeting.process} of {meeting.size} could not reach process 0 at {address}:{port} within "
                    f"{meeting.timeout.total_seconds():g} s: {error}",
                    hint="Look for the error of process 0; MASTER_ADDR and MASTER_PORT must be its own on all hosts.",
                ) from None
        else:
            return TCPStore(address, port, meeting.size, False, timeout=meeting.timeout, wait_for_workers=False)


def _run_name() -> str:
    """What tells this run from others; processes that somebody else has started need not have anything."""
    names = (RUN, "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    return "/".join(os.environ[name] for name in names if name in os.environ)


def _gloo_address() -> str:
    """Where others will reach this process over Gloo: at the address of its host's name (torch 2.13)."""
    if _INTERFACE in os.environ:
        return ""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return _LOOPBACK


def _check_addresses(places: list[tuple[str, str]]) -> None:
    """Raise, on all processes alike, if one on another host could not be reached.

    Args:
        places: the name of the host of each process, and its address; empty: the user has named an interface.
    """
    for number, (host, address) in enumerate(places):
        if len(dict(places)) > 1 and address and ipaddress.ip_address(address).is_loopback:
            raise ConfigurationError(
                f"Process {number} could not be reached from other hosts: the name of its host, {host}, "
                f"stands for {address} there.",
                hint=f"Set {_INTERFACE} to the network interface between the hosts, such as eth0 (see `ip addr`).",
            )
