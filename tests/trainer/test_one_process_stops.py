"""``trainer.should_stop`` in a hook: all processes set it, or process 0 does before its report about the batch."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CollectiveError, CommunicationError
from tests.support.lit_modules import Data, Lit
from tests.support.processes import outcomes, run_trainers
from tests.support.trainer_runs import QUIET, quiet


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


def stopped(process: int, hook: str, processes: tuple[int, ...], replicas: int = 1) -> int:
    quiet()
    strategy = PipeStrategy(layers="model", micro_batches=2, data_parallel_size=replicas)
    stops = Stops(hook, processes)
    trainer = L.Trainer(
        accelerator="cpu", devices=2 * replicas, strategy=strategy, max_epochs=3, callbacks=[stops], **QUIET
    )
    trainer.fit(Lit().double(), datamodule=Data())
    return stops.batches


@pytest.mark.feature("Hooks", "trainer.should_stop in a hook, on all processes", "works")
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("hook", "processes"), [("on_train_batch_end", (0, 1)), ("on_train_batch_start", (0,)), ("on_train_start", (0, 1))]
)
def test_all_stop_after_the_same_batch(hook: str, processes: tuple[int, ...]) -> None:
    batches = 0 if hook == "on_train_start" else 2
    assert run_trainers(stopped, 2, timeout=40, hook=hook, processes=processes) == [batches] * 2


@pytest.mark.feature(
    "Hooks",
    "trainer.should_stop in a hook, on one process alone",
    "refused",
    "within seconds; process 0 may do so before the step",
)
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("hook", "process", "replicas"),
    [
        pytest.param("on_train_batch_end", 0, 1, marks=pytest.mark.slow),
        ("on_train_batch_end", 1, 1),
        pytest.param("on_train_batch_start", 1, 1, marks=pytest.mark.slow),
        pytest.param("on_train_start", 0, 1, marks=pytest.mark.slow),
        pytest.param("on_train_epoch_end", 1, 1, marks=pytest.mark.slow),
        pytest.param("on_validation_end", 0, 1, marks=pytest.mark.slow),
        pytest.param("on_train_batch_end", 3, 2, marks=pytest.mark.slow),
    ],
)
def test_one_that_stops_alone_ends_all(hook: str, process: int, replicas: int) -> None:
    ended = outcomes(stopped, 2 * replicas, timeout=50, hook=hook, processes=(process,), replicas=replicas)
    assert isinstance(ended[process].error, CollectiveError)
    for outcome in ended:
        assert isinstance(outcome.error, CollectiveError | CommunicationError)
        assert "is called on rank" in str(outcome.error)
        assert "Call it on all processes" in str(outcome.error)
