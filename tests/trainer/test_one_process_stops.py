"""``trainer.should_stop`` in a hook: all processes set it, or process 0 does before its report about the batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CollectiveError, CommunicationError
from tests.support.lit_modules import Data, Lit
from tests.support.processes import in_turn, refusals
from tests.support.trainer_runs import QUIET, impatient, quiet


class Stops(L.Callback):
    """Asks the Trainer to stop in a hook, in the second batch of an epoch where there is one, on some processes."""

    def __init__(self, hook: str, processes: tuple[int, ...]) -> None:
        self.processes, self.batches = processes, 0
        setattr(self, hook, self.ask)

    def ask(self, trainer: L.Trainer, *arguments: Any, **_: Any) -> None:
        second = arguments[-1] == 1 if isinstance(arguments[-1], int) else not trainer.sanity_checking
        if trainer.global_rank in self.processes and second:
            trainer.should_stop = True

    def on_before_zero_grad(self, *_: Any) -> None:
        self.batches += 1


def stopped(process: int, hook: str, processes: tuple[int, ...]) -> int:
    quiet()
    strategy = PipeStrategy(layers="model", micro_batches=2, compare_losses=False)
    stops = Stops(hook, processes)
    options = {**QUIET, "max_epochs": 3, "num_sanity_val_steps": 0}
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, callbacks=[stops], **options)
    trainer.fit(Lit().double(), datamodule=Data())
    return stops.batches


TOGETHER = [("on_train_batch_end", (0, 1)), ("on_train_batch_start", (0,)), ("on_train_start", (0, 1))]


@pytest.mark.feature("Hooks", "trainer.should_stop in a hook, on all processes", "works")
def test_all_stop_after_the_same_batch() -> None:
    calls = {hook: partial(stopped, hook=hook, processes=processes) for hook, processes in TOGETHER}
    for hook, found in in_turn(calls, 2).items():
        assert found == [0 if hook == "on_train_start" else 2] * 2


def alone(process: int, case: tuple[str, int]) -> None:
    """One process stops, and the other soon says for how long it waits."""
    hook, other = case
    with impatient():
        stopped(process, hook, (other,))


@pytest.mark.feature(
    "Hooks",
    "trainer.should_stop in a hook, on one process alone",
    "refused",
    "within seconds; process 0 may do so before the step",
)
def test_one_that_stops_alone_ends_all() -> None:
    """The campaign of faults has further hooks."""
    for (_, process), errors in refusals(alone, 2, [("on_train_batch_end", 1), ("on_train_start", 0)]).items():
        assert isinstance(errors[process], CollectiveError)
        for error in errors:
            assert isinstance(error, CollectiveError | CommunicationError)
            assert "is called on rank" in str(error)
            assert "Call it on all processes" in str(error)
