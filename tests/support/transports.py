"""Runs a function on every rank over one of the transports."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lightning_pipe.transport.topology import Topology
from tests.support.threads import run_threads, thread_world

Run = Callable[..., list[Any]]


def run_in_threads(fn: Callable[..., Any], topology: Topology, group_timeout: float = 15.0, **kwargs: Any) -> list[Any]:
    world = thread_world(topology, timedelta(seconds=group_timeout))
    return run_threads(world, lambda transport: fn(transport, **kwargs), timeout=30)


LOCAL = {"gloo": False, "local": True}
EVERY = ["threads", *LOCAL]
