"""Two hosts on this one: network namespaces that a virtual cable joins. Needs root and ``ip``."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18


@dataclass(frozen=True)
class Host:
    """One end of the cable.

    Args:
        name: of the namespace.
        device: the interface.
        address: of the interface.
        files: a folder in which each host has temporary files of its own.
        names: a file with the names of both hosts: asking a name server takes long where there is none.
    """

    name: str
    device: str
    address: str
    files: str
    names: str

    def enter(self) -> None:
        """Let this process, and what it starts, run on the host. It must have one thread."""
        with open(f"/run/netns/{self.name}") as namespace:
            _call("setns", namespace.fileno(), _CLONE_NEWNET)
        _call("unshare", _CLONE_NEWNS)
        _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        _call("mount", self.names.encode(), b"/etc/hosts", None, _MS_BIND, None)
        # Who finds a socket among temporary files is on the same host, and shares memory.
        _call("mount", b"tmpfs", self.files.encode(), b"tmpfs", 0, None)
        os.environ["TMPDIR"] = tempfile.tempdir = self.files
        os.environ["GLOO_SOCKET_IFNAME"] = self.device


def pull() -> None:
    """Take the cable out of the host that this process is on: nothing arrives any more, and nobody is told."""
    _run("ip", "link", "set", os.environ["GLOO_SOCKET_IFNAME"], "down")


@contextmanager
def joined() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them; gone afterwards.

    Raises:
        OSError: they are not permitted here, with the reason.
    """
    number, folder = uuid.uuid4().hex[:6], Path(tempfile.mkdtemp(prefix="lightning-pipe-hosts-"))
    names = folder / "names"
    hosts = tuple(
        Host(f"lp-{number}-{end}", f"lp{number}{end}", f"10.213.77.{end + 1}", str(folder / "files"), str(names))
        for end in (0, 1)
    )
    try:
        own = f"127.0.0.1 localhost {socket.gethostname()}"
        names.write_text("\n".join([own, *(f"{host.address} {host.name}" for host in hosts), ""]))
        (folder / "files").mkdir()
        for host in hosts:
            _run("ip", "netns", "add", host.name)
        first, second = hosts
        ends = (first.device, "netns", first.name, "type", "veth", "peer", "name", second.device, "netns", second.name)
        _run("ip", "link", "add", *ends)
        for host in hosts:
            _run("ip", "-n", host.name, "address", "add", f"{host.address}/30", "dev", host.device)
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
            _run("ip", "-n", host.name, "link", "set", host.device, "up")
        yield first, second
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.name], check=False, capture_output=True)
        shutil.rmtree(folder)


@cache
def why_not() -> str | None:
    """Why there cannot be such hosts here; ``None`` if there can."""
    if shutil.which("ip") is None:
        return "ip of iproute2 is not installed"
    try:
        with joined() as (host, _):
            subprocess.run(["ip", "netns", "exec", host.name, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made: {error}"
    return None


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}`: {done.stderr.strip()}")
    return done.stdout


def _call(name: str, *arguments: Any) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
