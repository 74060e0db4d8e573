"""Starts the other processes of a run as Lightning does, and ends them with the first one."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.lightning_internals import SubprocessLauncher, set_threads
from lightning_pipe.trainer.children import CHILD, Children
from lightning_pipe.trainer.connect import RUN
from lightning_pipe.trainer.signals import leaving_with_others


class ScriptLauncher(SubprocessLauncher):
    """Runs this script again for every other process of the node."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """Whether a session that has no script can use it: no other process would run one."""
        return self.num_processes * self.num_nodes == 1

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        # as Lightning 2.6, whose own observer kills this process within five seconds of a child's failure: before it
        # can say why, while it writes a checkpoint, and with another exit code than that of its own error
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
        set_threads(num_processes=self.num_processes)
        Children.failed = True  # until it has come to its end
        with leaving_with_others(trainer):
            result = function(*args, **kwargs)
            trainer.strategy.processes.finish()
        Children.failed = False
        return result

    @override
    def _call_children_scripts(self) -> None:
        _check_sweep()
        if self.num_nodes == 1:  # every node has a launcher, and nobody tells the others a number
            os.environ[RUN] = uuid.uuid4().hex
        os.environ[CHILD] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[CHILD]
        Children(self.procs)


def _check_sweep() -> None:
    """Refuse to start other processes from a job of a sweep: Lightning (2.6) would have each run all of the sweep.

    Raises:
        ConfigurationError: this is one of the jobs of a sweep of Hydra's.
    """
    if "hydra" not in sys.modules:
        return
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN:
        raise ConfigurationError(
            "A sweep of Hydra's cannot start the processes of a pipeline: each of them would run the whole sweep.",
            hint="Start the sweep with torchrun, which starts all processes once: torchrun --standalone "
            "--nproc-per-node 2 train.py -m … for devices=2. Or run its jobs one by one, without -m.",
        )
