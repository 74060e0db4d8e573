"""Starts the other processes of a run as Lightning does; under Hydra each with the job's own overrides and folder."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from typing_extensions import override

from lightning_pipe.lightning_internals import SubprocessLauncher, basic_command

if TYPE_CHECKING:
    from lightning_pipe.world import World

_PR_SET_PDEATHSIG = 1
_CHILD = "LIGHTNING_PIPE_CHILD"
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")
# Hydra's options with a value; the other words of its command line are flags and overrides.
_WITH_VALUE = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--package", "-p")
_OF_SWEEPS = ("hydra.mode=", "hydra.sweep", "hydra/sweeper", "hydra/launcher", "hydra.launcher", "hydra.run.dir=")


@dataclass
class _Started:
    """What a Hydra job has started, to be forgotten when it is over.

    Args:
        job: names it; ``None`` outside Hydra.
        environment: the variables as they were before.
        processes: the children.
        worlds: what this process has opened with them.
    """

    job: str | None
    environment: dict[str, str | None]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    worlds: list[World] = field(default_factory=list)


class ScriptLauncher(SubprocessLauncher):
    """Runs this script again for every other process of the node.

    Lightning 2.6 gives the children of a Hydra sweep the command line of the whole sweep, so that each of them starts
    a sweep of its own. Here they get the overrides of the job and the output folder of the first process.
    """

    # environment variables and process group belong to the process, and so does the memory of who has set them
    _started: _Started | None = None

    @staticmethod
    def forget_finished_job() -> None:
        """Leave nothing of an earlier Hydra job in this process: children, process group, environment variables."""
        started = ScriptLauncher._started
        if started is None or started.job == _job():
            return
        ScriptLauncher._started = None
        for process in started.processes:
            process.wait()
        for world in started.worlds:
            world.close()
        if dist.is_available():
            if dist.is_initialized():
                dist.destroy_process_group()
            # a group that failed while it was made leaves its number behind: the children's would have another name,
            # and all would wait for the timeout (torch 2.13)
            dist.distributed_c10d._world.group_count = 0
        # torch keeps the server of a store as long as anybody refers to the store, and gives it, with the addresses
        # of the last job's processes, to the next store on the same port: MASTER_PORT may be the user's (torch 2.13)
        gc.collect()
        for name, value in started.environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    @staticmethod
    def belongs_to_job(world: World) -> None:
        """Close this world when the job is over that has started the processes."""
        if ScriptLauncher._started is not None:
            ScriptLauncher._started.worlds.append(world)

    @override
    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        started = _Started(_job(), {name: os.environ.get(name) for name in _VARIABLES}, self.procs)
        ScriptLauncher._started = started
        environment = self.cluster_environment
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        os.environ["NODE_RANK"] = str(environment.node_rank())
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        for local_rank in range(1, self.num_processes):
            command, folder = _command(local_rank)
            variables = {**os.environ, "LOCAL_RANK": str(local_rank), _CHILD: "1"}
            self.procs.append(subprocess.Popen(command, env=variables, cwd=folder))


def die_with_parent() -> None:
    """In a process that a launcher has started: end when the first process ends in whatever way (on Linux)."""
    if is_child() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def is_child() -> bool:
    """Whether a launcher has started this process, whose output is that of the first one."""
    return bool(os.environ.get(_CHILD))


def leave_quietly(error: BaseException) -> None:
    """Let the process end with this error without printing it."""
    before = sys.excepthook

    def hook(kind: Any, raised: BaseException, trace: Any) -> None:
        if raised is not error:
            before(kind, raised, trace)

    sys.excepthook = hook


def _command(local_rank: int) -> tuple[list[str], str | None]:
    """How to start another process of this run, and where."""
    command = list(basic_command())
    config = _hydra()
    if config is None:
        return command, None
    script = command[: len(command) - len(sys.argv[1:])]
    arguments = [*_options(sys.argv[1:]), *config.overrides.task]
    arguments += [word for word in config.overrides.hydra if not word.lstrip("+~").startswith(_OF_SWEEPS)]
    folder = str(config.runtime.output_dir).replace("\\", "\\\\").replace("'", "\\'")
    number = config.job.get("num")
    arguments += [f"hydra.run.dir='{folder}'", "hydra.output_subdir=null"]
    arguments += [f"hydra.job.name={config.job.name}_process_{local_rank}"]
    arguments += [] if number is None else [f"hydra.job.num={number}"]
    return script + arguments, str(config.runtime.cwd)


def _options(words: Sequence[str]) -> Iterator[str]:
    """Hydra's options with a value in a command line."""
    for position, word in enumerate(words):
        if word.split("=", 1)[0] in _WITH_VALUE:
            yield word
            if "=" not in word:
                yield from words[position + 1 : position + 2]


def _job() -> str | None:
    """What tells the Hydra jobs of this process apart."""
    config = _hydra()
    return None if config is None else f"{config.job.get('num')} in {config.runtime.output_dir}"


def _hydra() -> Any | None:
    """Hydra's own configuration if this is one of its jobs."""
    if "hydra" not in sys.modules:
        return None
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.get() if HydraConfig.initialized() else None
