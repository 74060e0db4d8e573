"""Convolutional networks, dropout curves, the plan and a measured balance, under the Trainer in several processes."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from tests.support import oracle, processes
from tests.support.networks import LitDropout, LitHalfDropout, LitResNet, LitUNet
from tests.support.pairs import slow_but
from tests.support.trainer_runs import QUIET, quiet

MODULES: dict[str, Any] = {
    "resnet": LitResNet,
    "unet": LitUNet,
    "dropout": LitDropout,
    "half": LitHalfDropout,
}
Run = dict[str, Any]


def fit(name: str, devices: int, options: dict[str, Any] | None) -> tuple[list[float], dict[str, Tensor], str]:
    """Losses, weights and what process 0 prints; ``options=None``: on one plain device."""
    from lightning_pipe import PipeStrategy

    quiet()
    L.seed_everything(7, verbose=False)
    module, recorder, printed = MODULES[name]().double(), oracle.Recorder(), io.StringIO()
    strategy = "auto" if options is None else PipeStrategy(layers=module.layers, **options)
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, callbacks=[recorder], **QUIET
    )
    with redirect_stdout(printed):
        trainer.fit(module, module.data())
    return recorder.trace.losses, oracle.state_of(module), printed.getvalue()


def fits(process: int, devices: int, runs: list[Run], cache: str) -> list[Any]:
    """Several trainings in one world."""
    os.environ["LIGHTNING_PIPE_CACHE"] = cache
    return [fit(run["name"], devices, run["options"]) for run in runs]


def in_processes(devices: int, runs: list[Run], cache: str = "") -> list[Any]:
    return processes.run_trainers(fits, devices, timeout=110, devices=devices, runs=runs, cache=cache)[0]  # type: ignore[no-any-return]


@pytest.mark.timeout(120)
def test_convolutional_networks_train_as_on_one_device() -> None:
    """One micro-batch: then batch norm sees what it sees on one device."""
    names = ("resnet", "unet")
    runs = [{"name": name, "options": {"micro_batches": 1, "schedule": "gpipe"}} for name in names]
    for name, (losses, weights, _) in zip(names, in_processes(2, runs), strict=True):
        expected, expected_weights, _ = fit(name, 1, None)
        assert losses == pytest.approx(expected, abs=1e-9), name
        for key, value in expected_weights.items():
            # a deferred batch norm computes the same statistics in another order
            torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-9, msg=f"{name}: {key}")


SEVERAL_AT_ONCE: list[Run] = [
    {"schedule": "interleaved", "recompute": "except_last"},
    {"schedule": "zero_bubble"},
    {"schedule": "chimera", "recompute": "always"},
]
ALONE: list[Run] = [{"schedule": "gpipe"}, {"schedule": "1f1b"}, {"schedule": "chimera"}, {"recompute": "always"}]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("stages", "options"), slow_but([(4, SEVERAL_AT_ONCE), (2, ALONE)], (4, SEVERAL_AT_ONCE)))
def test_the_dropout_curve_does_not_depend_on_stages_and_schedule(stages: int, options: list[Run]) -> None:
    """On one process with so many stages, and on two processes with each of the options."""
    expected, *_ = fit("dropout", 1, {"micro_batches": 4})
    found = {f"{stages} stages": fit("dropout", 1, {"micro_batches": 4, "stages": stages})[0]}
    runs = [{"name": "dropout", "options": {"micro_batches": 4, **each}} for each in options]
    found |= {str(each): run[0] for each, run in zip(options, in_processes(2, runs), strict=True)}
    for what, losses in found.items():
        assert losses == pytest.approx(expected, abs=1e-9), what


@pytest.mark.timeout(120)
def test_dropout_does_not_depend_on_replicas() -> None:
    """The same twelve micro-batches, of one sample each, on one device and on two replicas."""
    losses, expected, _ = fit("dropout", 1, {"micro_batches": 12})
    sizes: dict[str, Any] = {"pipeline_parallel_size": 1, "data_parallel_size": 2}
    runs = [{"name": "half", "options": {"micro_batches": 6, **sizes}}]
    found = processes.run_trainers(fits, 2, timeout=110, devices=2, runs=runs, cache="")
    for ((mine, weights, _),) in found:
        assert len(mine) == len(losses)
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-9, msg=key)
    means = [sum(pair) / 2 for pair in zip(*(mine for ((mine, *_),) in found), strict=True)]
    assert means == pytest.approx(losses, abs=1e-9)


@pytest.mark.timeout(120)
def test_the_plan_is_told(tmp_path: Path) -> None:
    ((_, _, first),) = in_processes(2, [{"name": "dropout", "options": {"micro_batches": 4}}], str(tmp_path))
    assert "Pipeline of LitDropout" in first
    assert "12 samples per optimizer step = 12 (batch) x 1 (replicas) x 1 (accumulation)" in first
    assert "predicted bubble 20.0 %" in first
    assert "balanced by parameters: the largest stage costs" in first
    assert "Pipeline: 7 batches" in first
    assert "bubble measured" in first
