"""Two or more nodes on one host: an agent of torchrun for each, whose workers are forked instead of started anew."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from tests.support import processes
from tests.support.hosts import Host

_LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK")


def run_nodes(fn: Callable[..., Any], *arguments: Any, **options: Any) -> list[dict[int, Any]]:
    """Call ``fn(*arguments)`` in every worker of every node; for each node its workers' results by global rank."""
    return processes.results(node_outcomes(fn, *arguments, **options))


def node_outcomes(
    fn: Callable[..., Any],
    *arguments: Any,
    nodes: int = 2,
    per_node: int = 1,
    restarts: int = 0,
    timeout: float = 60.0,
    hosts: Sequence[Host] = (),
) -> list[processes.Outcome]:
    """As `run_nodes`, but says how each agent ended. Agent and workers of a node are one process group.

    Args:
        fn: a function at the top level of a module.
        *arguments: passed on; they must pickle.
        nodes: number of agents.
        per_node: workers of each.
        restarts: ``torchrun --max-restarts``.
        timeout: seconds after which everything is killed.
        hosts: where the agents run; empty: all of them here.
    """
    call = (fn, arguments, nodes, per_node, restarts, hosts)
    return processes.outcomes(_agent, nodes, timeout=timeout, group_timeout=None, call=call)


_Call = tuple[Callable[..., Any], tuple[Any, ...], int, int, int, Sequence[Host]]


def _agent(node: int, call: _Call) -> dict[int, Any]:
    """What ``torchrun`` does after it has read its command line."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    fn, arguments, nodes, per_node, restarts, hosts = call
    addresses, port = [host.address for host in hosts] or ["127.0.0.1"] * nodes, os.environ["MASTER_PORT"]
    for name in _LAUNCHER:
        os.environ.pop(name)
    if hosts:
        hosts[node].enter()
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=per_node,
        run_id="test",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{addresses[0]}:{port}",
        rdzv_configs={"is_host": node == 0},
        max_restarts=restarts,
        monitor_interval=0.05,
        start_method="fork",  # what the workers import is there already
        local_addr=addresses[node],
    )
    found: dict[int, Any] = elastic_launch(config, _worker)(fn, arguments)
    return found


def _worker(fn: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call the function in a process that knows nothing of the agent that it is a copy of."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # as in a new process; the agent's would only note them
    return fn(*arguments)
