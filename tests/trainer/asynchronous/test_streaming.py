"""A Trainer with a schedule without a flush: losses, logs and steps against the papers' closed forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_pipe.schedules import PipeDream
from tests.support.asynchronous_engine import pipedream, two_versions
from tests.support.asynchronous_trainer import (
    BATCHES,
    EPOCH,
    ROWS,
    Feed,
    Lit,
    Outcome,
    assert_close,
    assert_weights,
    closed_form,
    fit,
    run,
    run_all,
)

PIPEDREAM = {"schedule": "pipedream", "layers": "net.layers"}


class Freezes(Lit):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.layers[5].requires_grad_(batch_idx < 2)


REFUSED: dict[str, dict[str, Any]] = {
    "gradient_clip_val=1.0 limits the norm": {"trainer": {"gradient_clip_val": 1.0}},
    "the Trainer has accumulate_grad_batches=2": {"trainer": {"accumulate_grad_batches": 2}},
    "accumulate_grad_batches=2": {
        "trainer": {"max_epochs": 2},
        "callbacks": [GradientAccumulationScheduler({1: 2})],
    },
    "frozen or unfrozen (requires_grad) while": {"module": Freezes},
    "16-mixed precision scales the loss": {"plugins": True},
    "makes a step of 1 micro-batches": {"strategy": {"micro_batches": 2}},
    "shard_optimizer='gradients' does not go": {"strategy": {"shard_optimizer": "gradients"}},
}
"""By what is said."""
RUNS: dict[str, dict[str, Any]] = {
    "two epochs": {
        "strategy": {"schedule": "pipedream_2bw", "micro_batches": 4, "balance": [3, 3]},
        "trainer": {"max_epochs": 2, "val_check_interval": 3},
    },
    "limited": {"trainer": {"max_steps": 5, "max_epochs": -1}},
    "stopped": {"trainer": {"max_epochs": 3}, "stop_at": 2},
}
Found = dict[str, list[Outcome]]


class Long(Lit):
    def train_dataloader(self) -> Any:
        return Feed(BATCHES)


@pytest.fixture(scope="module")
def found() -> Found:
    runs = {name: {**each, "strategy": PIPEDREAM | each.get("strategy", {})} for name, each in (RUNS | REFUSED).items()}
    return run_all(runs)


def test_two_epochs_with_validation_in_between(found: Found) -> None:
    outcomes, drains = found["two epochs"], [3, 6, 7, 10, 13, 14]
    losses, evaluated, values = closed_form([*range(EPOCH)] * 2, 2, two_versions, drains, 4)
    assert_weights(outcomes, values)
    for outcome in outcomes:
        assert outcome.steps == len(losses)
        # one of each for every step; gradients are zeroed, and passed on, in calls without a step, too
        assert outcome.seen.count("step") == len(losses)
        assert outcome.seen.count("zero") == outcome.seen.count("backward") == len(losses) + len(drains)
        # every loss once, each at a number of its own
        assert_close(outcome.logged["train_loss_step"], losses)
        assert outcome.numbers == sorted(set(outcome.numbers))
        epochs = [losses[:EPOCH], losses[EPOCH:]]
        means = [sum(loss * rows for loss, rows in zip(epoch, ROWS, strict=True)) / sum(ROWS) for epoch in epochs]
        assert_close(outcome.logged["train_loss_epoch"], means)
        assert_close(outcome.logged["val_loss"], [evaluated[i] for i in (0, 1, 3, 4)])
        arrived = torch.tensor(outcome.outputs)
        assert len(arrived) == len(losses)
        assert int(arrived.isnan().sum()) == len(drains)


def test_the_end_comes_after_what_is_in_flight(found: Found) -> None:
    limited, stopped = found["limited"], found["stopped"]
    # exactly as many steps as asked for
    losses, _, values = closed_form(range(5), 2, pipedream(2), [])
    assert_weights(limited, values)
    assert [outcome.steps for outcome in limited] == [5, 5]
    # the step of batch 2 asks to stop, when batch 3 has begun
    losses, _, values = closed_form(range(4), 2, pipedream(2), [])
    assert_weights(stopped, values)
    assert_close(stopped[1].logged["train_loss_step"], losses)


def test_replicas_of_stages_step_after_several_batches() -> None:
    strategy = {"schedule": PipeDream(replicas=(2, 1)), "layers": "net.layers", "balance": [3, 3]}
    outcomes = run(strategy, {}, devices=3)
    version = lambda s, t: max(0, (t // 2 - 1, t)[s])  # noqa: E731
    losses, _, values = closed_form(range(EPOCH), 2, version, [], together=[2, 1])
    assert_weights(outcomes, values)
    # steps are counted alike on all ranks, whoever takes them: by batches
    assert [outcome.steps for outcome in outcomes] == [EPOCH] * 3
    assert [outcome.seen.count("step") for outcome in outcomes] == [EPOCH, 4, 4]
    assert_close(outcomes[1].logged["train_loss_step"], losses)


def test_one_device_goes_on_behind_validations_and_checkpoints_as_several_do(tmp_path: Path) -> None:
    strategy = {"schedule": "pipedream_2bw", "layers": "net.layers", "micro_batches": 4, "stages": 3}
    options: dict[str, Any] = {"trainer": {"max_epochs": 2, "val_check_interval": 3}, "devices": 1, "module": Long}
    whole = fit(0, strategy, saves=(str(tmp_path), [5]), **options)
    resumed = fit(0, strategy, resume=str(tmp_path / "5.ckpt"), **options)
    losses, _, values = closed_form([*range(EPOCH)] * 2, 1, two_versions, [3, 5, 6, 7, 10, 13], 4)
    assert_weights([whole, resumed], values)
    assert_close(whole.logged["train_loss_step"], losses)
    assert_close(resumed.logged["train_loss_step"], losses[5:])


@pytest.mark.feature(
    "Optimizers and schedulers",
    "accumulation, clipping by norm and 16-mixed with asynchronous schedules",
    "refused",
    "each names the option",
)
def test_refusals(found: Found) -> None:
    for message in REFUSED:
        for outcome in found[message]:
            assert message in outcome.error
