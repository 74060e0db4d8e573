"""How processes find each other, and who may come."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CommunicationError, ConfigurationError
from lightning_pipe.trainer import connect
from lightning_pipe.trainer.world import World
from tests.support.processes import free_port, run_trainers


def meeting(process: int, seconds: float = 5.0) -> connect._Meeting:
    return connect._Meeting(process, 2, timedelta(seconds=seconds))


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"Port {port}, .* is taken(.|\n)*MASTER_PORT"):
            connect._serve("127.0.0.1", port, meeting(0))


def test_a_process_that_does_not_come_is_named() -> None:
    store = connect._serve("127.0.0.1", free_port(), meeting(0))
    with pytest.raises(CommunicationError, match=r"Process 0 of 2 has waited 0\.3 s for process 1"):
        meeting(0, 0.3).attempt(store)


def test_a_process_0_that_does_not_come_is_told() -> None:
    with pytest.raises(CommunicationError, match=r"Process 1 of 2 could not reach process 0 at 127\.0\.0\.1"):
        connect._find("127.0.0.1", free_port(), meeting(1, 0.3))


def test_an_attempt_has_a_name_of_its_own_in_the_store_of_the_last() -> None:
    port = free_port()
    server = connect._serve("127.0.0.1", port, meeting(0))  # as an agent of torchrun, over several attempts

    def come(process: int, wait: float) -> str:
        time.sleep(wait)
        return meeting(process).attempt(connect._find("127.0.0.1", port, meeting(process)))

    names = []
    for first in (0, 1, 0):  # whoever comes first: process 1 finds the name of the last attempt
        with ThreadPoolExecutor(2) as pool:
            found = [pool.submit(come, process, 0.3 * (process != first)) for process in (0, 1)]
            mine, other = (each.result(10) for each in found)
        assert mine == other
        names.append(mine)
    assert len(set(names)) == 3
    with pytest.raises(CommunicationError, match=r"Process 1 of 2 has waited 0\.3 s for process 0"):
        meeting(1, 0.3).attempt(connect._find("127.0.0.1", port, meeting(1)))
    with pytest.raises(CommunicationError, match=r"Process 0 of 2 has waited 0\.3 s for process 1"):
        meeting(0, 0.3).attempt(server)


def test_a_host_that_others_cannot_reach_is_named() -> None:
    connect._check_addresses([("a", "127.0.0.1"), ("a", "127.0.0.1")])  # one host
    connect._check_addresses([("a", "10.0.0.1"), ("b", "")])  # the user has named an interface
    with pytest.raises(
        ConfigurationError, match=r"Process 1 .* its host, b, stands for 127\.0\.1\.1(.|\n)*GLOO_SOCKET"
    ):
        connect._check_addresses([("a", "10.0.0.1"), ("b", "127.0.1.1")])


def test_runs_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (connect.RUN, "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert connect._run_name() == ""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv(connect.RUN, "a")
    assert connect._run_name() == "a/7"


def listening() -> set[str]:
    """The addresses at which this process listens, as the system writes them."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except OSError:
            continue
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                found.add(words[1].split(":")[0])
    return found


def opened(process: int) -> tuple[set[str], str | None]:
    environment = LightningEnvironment()
    environment.set_world_size(2)
    environment.set_global_rank(process)
    devices = [torch.device("cpu")] * 2
    strategy = PipeStrategy("gpipe", timeout=timedelta(seconds=20), parallel_devices=devices)
    strategy.cluster_environment = environment
    world = World()
    world.open(strategy)
    world.transport.make_groups([(0, 1)])
    world.barrier()
    return listening(), os.environ.get("GLOO_SOCKET_IFNAME")


def test_on_one_host_nobody_listens_to_the_network() -> None:
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    for addresses, interface in run_trainers(opened, 2):
        assert addresses
        assert addresses <= loopback
        assert interface == "lo"  # for groups of the user's, too
