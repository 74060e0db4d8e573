"""Starts the other processes of a run as Lightning does; under Hydra each with the job's own overrides and folder."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from typing_extensions import override

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.lightning_internals import SubprocessLauncher, basic_command, set_threads
from lightning_pipe.trainer.children import CHILD, Children
from lightning_pipe.trainer.connect import RUN
from lightning_pipe.trainer.schedule_choice import checkpoint_of
from lightning_pipe.trainer.signals import ending_by_termination, leaving_with_others
from lightning_pipe.transport.failures import joined_threads

if TYPE_CHECKING:
    from lightning_pipe.trainer.world import World

_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE", RUN)
# Seconds that the processes of a Hydra job get for the rest of their script.
_UNTIL_NEXT_JOB = 600.0
# Hydra's options with a value; the other words of its command line are flags and overrides.
_WITH_VALUE = ("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd", "--package", "-p")
_OF_SWEEPS = ("hydra.mode=", "hydra.sweep", "hydra/sweeper", "hydra/launcher", "hydra.launcher", "hydra.run.dir=")


@dataclass
class _Started:
    """What a Hydra job has started, to be forgotten when it is over.

    Args:
        job: names it; ``None`` outside Hydra.
        environment: the variables as they were before.
        children: the processes.
        worlds: what this process has opened with them.
    """

    job: str | None
    environment: dict[str, str | None]
    children: Children | None = None
    worlds: list[World] = field(default_factory=list)


class ScriptLauncher(SubprocessLauncher):
    """Runs this script again for every other process of the node.

    Lightning 2.6 gives the children of a Hydra sweep the command line of the whole sweep, so that each of them starts
    a sweep of its own. Here they get the overrides of the job and the output folder of the first process.
    """

    # environment variables and process group belong to the process, and so does the memory of who has set them
    _started: _Started | None = None
    # from which the run resumes, as it was given to the Trainer
    checkpoint: Any = None

    @staticmethod
    def forget_finished_job() -> None:
        """Leave nothing of an earlier Hydra job in this process: children, process group, environment variables."""
        started = ScriptLauncher._started
        if started is None or started.job == _job():
            return
        ScriptLauncher._started = None
        if started.children is not None:
            started.children.end(patience=_UNTIL_NEXT_JOB)
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
            if ScriptLauncher._started.children is not None:
                ScriptLauncher._started.children.board = world.board

    @staticmethod
    def check_children() -> None:
        """Raise if one of the processes of this host has gone while they wait for each other; see `Children.check`."""
        started = ScriptLauncher._started
        if started is not None and started.children is not None:
            started.children.check()

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """Whether an interactive session can use it; `check_interactive` has refused those that cannot."""
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any | None = None, **kwargs: Any) -> Any:
        joined_threads.forget_failures()
        # as Lightning 2.6, whose own observer kills this process five seconds after a child's end, before it can say
        # why, and whose children live on if this one ends before they are connected
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
        set_threads(num_processes=self.num_processes)
        started = ScriptLauncher._started
        with ExitStack() as during:
            if trainer is not None:
                during.enter_context(ending_by_termination(trainer))
                during.enter_context(leaving_with_others(trainer))
            if started is not None and started.children is not None:
                during.enter_context(started.children.running())
            self.checkpoint = checkpoint_of(function, args, kwargs)
            result = function(*args, **kwargs)
            if trainer is not None:
                trainer.strategy.finish()
            return result

    @override
    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        started = _Started(_job(), {name: os.environ.get(name) for name in _VARIABLES})
        ScriptLauncher._started = started
        environment = self.cluster_environment
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        os.environ["NODE_RANK"] = str(environment.node_rank())
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        if self.num_nodes == 1:  # every node has a launcher, and nobody tells the others a number
            os.environ[RUN] = uuid.uuid4().hex
        for local_rank in range(1, self.num_processes):
            command, folder = _command(local_rank)
            variables = {**os.environ, "LOCAL_RANK": str(local_rank), CHILD: str(os.getpid())}
            # when process 0 is killed, each of torch's warnings has twenty lines of C++ frames (torch 2.13)
            variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            self.procs.append(subprocess.Popen(command, env=variables, cwd=folder))
        started.children = Children(self.procs, environment.node_rank() * self.num_processes)


def check_interactive(processes: int, environment: ClusterEnvironment) -> None:
    """Refuse to start other processes from a session that has no script for them to run.

    Args:
        processes: processes of the run.
        environment: tells whether somebody else starts them.

    Raises:
        ConfigurationError: a notebook, IPython or ``python -i`` asks for several processes.
    """
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    if interactive and processes > 1 and not environment.creates_processes_externally:
        raise ConfigurationError(
            f"The pipeline needs {processes} processes, and each of them runs the training script from its beginning; "
            "an interactive session (a notebook, IPython, python -i) has no script that they could run.",
            hint="Write the code into a file and run that: in a notebook begin the cell with %%writefile train.py, "
            "and run !python train.py in the next one. To look at a pipeline within this session use one process: "
            f"Trainer(devices=1, strategy=PipeStrategy(stages={processes})).",
        )


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
