"""What libraries find out once in each process, found out before the processes of tests are copies of this one."""

from __future__ import annotations

import functools
import gc
import io
import logging
import warnings
from contextlib import redirect_stdout

import lightning as L
import torch
from lightning.fabric.utilities import registry

from lightning_pipe import PipeStrategy
from tests.support.lit_modules import Data, Lit
from tests.support.oracle import SILENT


def remember_plugins() -> None:
    """Look once for what is installed and has callbacks for Trainers: each Trainer reads it from a hundred files."""
    registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[assignment]


def warm_up() -> None:
    """Train for one batch: a process's first run computes a third longer than its second."""
    if torch.cuda.is_available():  # a backward pass would begin threads, of which copies have none
        return
    torch.set_num_threads(1)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        logging.disable()
        strategy = PipeStrategy(stages=2, micro_batches=2)
        trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **SILENT)
        trainer.fit(Lit().double(), Data(8))
    logging.disable(logging.NOTSET)
    gc.collect()
    gc.freeze()
