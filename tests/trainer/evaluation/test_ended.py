"""An evaluation one of whose processes is killed: the others end, with a reason. For signals see `test_signals`."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning as L
import pytest
from torch import Tensor

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CommunicationError
from tests.support import processes
from tests.support.evaluated_modules import Evaluated, loader
from tests.support.trainer_runs import QUIET


class Killed(Evaluated):
    """One rank is killed in the middle of an evaluation."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        if batch_idx == 3 and self.trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().validation_step(batch, batch_idx)


def killed(process: int) -> str:
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=PipeStrategy(layers="model"), **QUIET)
    with pytest.raises(CommunicationError) as ended:
        trainer.validate(Killed().double(), loader(), verbose=False)
    return str(ended.value)


@pytest.mark.timeout(60)
def test_a_rank_that_is_killed_ends_the_other() -> None:
    last, first = processes.outcomes(killed, 2, timeout=50, group_timeout=None)
    assert isinstance(first.error, processes.ProcessDiedError)
    assert last.error is None
    assert "rank 1" in last.value  # it could not send, or not receive
    assert "a process may have been killed" in last.value
