"""Dropout curves, the plan and a measured bubble, under the Trainer in several processes."""

from __future__ import annotations

import functools
import io
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from tests.support import oracle, processes
from tests.support.networks import LitDropout, LitHalfDropout
from tests.support.pairs import asked, slow_but
from tests.support.trainer_runs import QUIET, quiet

Run = tuple[list[float], dict[str, Tensor], str]


def fit(process: int, devices: int, options: dict[str, Any], kind: type[LitDropout] = LitDropout) -> Run:
    """Losses, weights and what process 0 prints."""
    from lightning_pipe import PipeStrategy

    quiet()
    L.seed_everything(7, verbose=False)
    module, recorder, printed = kind().double(), oracle.Recorder(), io.StringIO()
    strategy = PipeStrategy(layers=module.layers, **options)
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, callbacks=[recorder], **QUIET
    )
    with redirect_stdout(printed):
        trainer.fit(module, module.data())
    return recorder.trace.losses, oracle.state_of(module), printed.getvalue()


DROPOUT: dict[str, dict[str, Any]] = {
    "interleaved": {"schedule": "interleaved", "recompute": "except_last"},
    "chimera": {"schedule": "chimera", "recompute": "always"},
    **{name: {"schedule": name} for name in ("1f1b", "gpipe", "zero_bubble")},
    "recompute": {"recompute": "always"},
}
FOUR = {"micro_batches": 4, "compare_losses": False}
HALVES = {"micro_batches": 6, "compare_losses": False, "pipeline_parallel_size": 1, "data_parallel_size": 2}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[Run]]:
    """What two ranks have."""
    calls = {name: partial(fit, devices=2, options={**FOUR, **DROPOUT[name]}) for name in asked(request, "schedule")}
    return processes.in_turn({**calls, "replicas": partial(fit, devices=2, options=HALVES, kind=LitHalfDropout)}, 2)


@functools.cache
def one_stage() -> list[float]:
    return fit(0, 1, FOUR)[0]


@pytest.mark.parametrize("schedule", slow_but(DROPOUT, "interleaved", "1f1b"))
def test_the_dropout_curve_does_not_depend_on_the_schedule(schedule: str, found: dict[str, list[Run]]) -> None:
    assert found[schedule][0][0] == pytest.approx(one_stage(), abs=1e-9)


def test_dropout_does_not_depend_on_replicas(found: dict[str, list[Run]]) -> None:
    """The same twelve micro-batches, of one sample each, on one device and on two replicas."""
    losses, expected, _ = fit(0, 1, {"micro_batches": 12, "compare_losses": False})
    for mine, weights, _ in found["replicas"]:
        assert len(mine) == len(losses)
        for key, value in expected.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-9, msg=key)
    means = [sum(pair) / 2 for pair in zip(*(mine for mine, *_ in found["replicas"]), strict=True)]
    assert means == pytest.approx(losses, abs=1e-9)


def test_the_plan_is_told(found: dict[str, list[Run]]) -> None:
    printed = found["1f1b"][0][2]
    assert "Pipeline of LitDropout" in printed
    assert "12 samples per optimizer step = 12 (batch) x 1 (replicas) x 1 (accumulation)" in printed
    assert "predicted bubble 20.0 %" in printed
    assert "balanced by parameters: the largest stage costs" in printed
    assert "Pipeline: 3 batches" in printed
    assert "bubble measured" in printed
