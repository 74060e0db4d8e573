"""Whatever a user does with a Trainer gives on two ranks what it gives on one plain device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import oracle
from tests.support.pairs import asked
from tests.support.processes import run_trainers
from tests.support.trainer_runs import CASES, Outcome, fit, fits

RANKS = 2

FLAG, CALLBACK, HOOK, DATA = "Trainer arguments", "Callbacks", "Hooks", "Data loaders"
PRECISION, OPTIMIZER = "Precision", "Optimizers and schedulers"
FEATURES: dict[str, list[tuple[str, str]]] = {
    "plain": [
        *((FLAG, name) for name in ("accelerator", "devices", "strategy", "max_epochs", "callbacks")),
        (CALLBACK, "Callback"),
        (PRECISION, "Precision"),
        (DATA, "a DataLoader that shuffles and has a short last batch"),
        (DATA, "LightningDataModule"),
        (OPTIMIZER, "an optimizer with a schedule for every step"),
        (HOOK, "self.log and torchmetrics"),
    ],
    "accumulated": [(FLAG, "accumulate_grad_batches")],
    "clipped": [(FLAG, "gradient_clip_val")],
    "options": [
        (FLAG, "gradient_clip_algorithm"),
        *((FLAG, name) for name in ("limit_train_batches", "limit_val_batches", "num_sanity_val_steps")),
        *((FLAG, name) for name in ("reload_dataloaders_every_n_epochs", "val_check_interval")),
        *((FLAG, name) for name in ("profiler", "detect_anomaly")),
    ],
    "configure_model_augmented": [
        (HOOK, "layers built in configure_model"),
        (DATA, "random transforms in the data"),
    ],
    "setup": [(HOOK, "layers built in setup")],
    "averaged": [(CALLBACK, "EMAWeightAveraging"), (CALLBACK, "WeightAveraging")],
    "stochastic_averaging_combined": [(CALLBACK, "StochasticWeightAveraging"), (DATA, "CombinedLoader")],
    "augmented_by_workers_until_should_stop": [
        (DATA, "random transforms in workers"),
        (HOOK, "trainer.should_stop in a step"),
    ],
    "frozen": [(OPTIMIZER, "SGD with momentum")],
    "finetuned_stream": [
        (CALLBACK, "BaseFinetuning"),
        (OPTIMIZER, "parameters that thaw during training"),
        (DATA, "IterableDataset"),
    ],
    "hooks": [
        (HOOK, "backward, optimizer_step and tensor hooks of one's own"),
        (HOOK, "what a step returns"),
        (HOOK, "collectives in steps"),
        (DATA, "several loaders for validation"),
        (OPTIMIZER, "several parameter groups"),
        (OPTIMIZER, "ReduceLROnPlateau"),
    ],
    "early_stopping": [(CALLBACK, "EarlyStopping")],
    "fast_dev_run": [(FLAG, "fast_dev_run")],
    "bf16_mixed_overfit_batches": [(PRECISION, "MixedPrecision"), (FLAG, "precision"), (FLAG, "overfit_batches")],
    "bf16_true": [(PRECISION, "HalfPrecision")],
    "double": [(PRECISION, "DoublePrecision")],
    "scaled": [(FLAG, "plugins"), (PRECISION, "MixedPrecision with a GradScaler (16-mixed)")],
}


SLOW = {
    *("micro_batches", "interleaved", "recomputed", "two_loss_ranks", "setup", "head_in_setup", "double"),
    *("accumulated", "clipped", "frozen", "averaged", "early_stopping"),
}
"""What others prove among the fast tests.

Tests of equality train with schedules. Some cases are of a kind of which one is fast; "finetuned_stream" clips, "hooks"
has SGD with momentum. A scheduler accumulates in `test_features`, weights are averaged in `checkpoints.test_divided`,
and an evaluation stops early in `evaluation.test_stream`.
"""


def marked(name: str) -> Any:
    """The case, with the features that it proves."""
    marks = [pytest.mark.feature(area, feature, "works") for area, feature in FEATURES.get(name, [])]
    return pytest.param(name, marks=[*marks, pytest.mark.slow] if name in SLOW else marks)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, Outcome]]:
    """All cases that were asked for, in one world: starting processes costs more than most cases."""
    return run_trainers(fits, RANKS, timeout=240, names=asked(request, "name"), devices=RANKS)


@pytest.mark.parametrize("name", [marked(name) for name in CASES])
def test_equals_one_device(name: str, outcomes: list[dict[str, Outcome]]) -> None:
    plain = fit(CASES[name], devices=None)
    for process, of_process in enumerate(outcomes):
        if name not in of_process:
            pytest.skip("an earlier case failed")
        found = of_process[name]
        assert not found.error, f"process {process}: {found.error}"
        oracle.assert_equal(found.trace, _without_counters(plain.trace, found.trace), CASES[name].tolerance)
        assert found.rows == plain.rows
        assert found.optimizer_steps == plain.optimizer_steps


def _without_counters(plain: oracle.Trace, found: oracle.Trace) -> oracle.Trace:
    """A buffer that counts calls of the step counts micro-batches."""
    plain.weights["steps"] = found.weights["steps"]
    return plain
