"""``trainer.should_stop``, set on one process alone in any hook, stops all processes after the same batch."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest

from tests.support.lit_modules import Data, Lit
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
)


class Asks(L.Callback):
    """One process asks in a hook, in the second epoch where there are several, in a batch where there are some."""

    def __init__(self, hook: str, process: int, batch: int = 2) -> None:
        self.process, self.epoch, self.batch = process, 0 if hook in HOOKS[:2] else 1, batch
        setattr(self, hook, self.ask)

    def ask(self, trainer: L.Trainer, *arguments: Any, **_: Any) -> None:
        batch = arguments[-1] if isinstance(arguments[-1], int) else self.batch
        here = trainer.global_rank == self.process and trainer.current_epoch == self.epoch
        if here and batch == self.batch and not trainer.sanity_checking:
            trainer.should_stop = True


class Counts(L.Callback):
    """Counts batches and validations."""

    def __init__(self) -> None:
        self.training = self.validation = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.training += 1

    def on_validation_batch_start(self, *_: Any) -> None:
        self.validation += 1


def counted(hook: str, process: int, devices: int | None, batch: int = 2, **options: Any) -> tuple[int, int]:
    from lightning_pipe import PipeStrategy

    quiet()
    counts = Counts()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices or 1,
        strategy=PipeStrategy(micro_batches=2, **options) if devices else "auto",
        max_epochs=3,
        callbacks=[Asks(hook, process, batch), counts],
        use_distributed_sampler=False,
        **QUIET,
    )
    trainer.fit(Lit().double(), datamodule=Data(28))
    return counts.training, counts.validation


def stopped(number: int, devices: int, **options: Any) -> dict[tuple[str, int], tuple[int, int]]:
    processes = range(devices) if devices == 2 else (devices - 1,)
    cases = [(hook, process) for hook in HOOKS for process in processes]
    return {(hook, process): counted(hook, process, devices, **options) for hook, process in cases}


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[int, int]]:
    found = {hook: counted(hook, 0, None) for hook in HOOKS}
    assert len(set(found.values())) == 4  # the hooks stop at different places
    return found


@pytest.mark.feature(
    "Hooks",
    "trainer.should_stop in a hook, on any process",
    "differs",
    "a request behind a stage's part of a batch holds after the next one",
)
@pytest.mark.parametrize("options", [{}, pytest.param({"data_parallel_size": 2}, marks=pytest.mark.slow)])
def test_all_stop_where_one_device_would(options: dict[str, int], expected: dict[str, tuple[int, int]]) -> None:
    devices = 4 if options else 2
    a_batch_later = counted("on_train_batch_end", 0, None, batch=3)

    def where(hook: str, process: int) -> tuple[int, int]:
        # behind its part of a batch an earlier stage's request goes along with the next one
        return a_batch_later if hook == "on_train_batch_end" and process % 2 else expected[hook]

    for counts in run_trainers(stopped, devices, timeout=90, devices=devices, **options):
        assert counts == {(hook, process): where(hook, process) for hook, process in counts}
