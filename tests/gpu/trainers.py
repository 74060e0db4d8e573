"""Trainers over ranks with a device each, and over several stages of one device: what users do, beside a plain one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_pipe import PipeStrategy
from tests.benchmarks.measure import Finding
from tests.gpu.rows import compared, moved_trace, not_run
from tests.gpu.setting import Setting
from tests.support import oracle, processes
from tests.support.lit_modules import Data
from tests.support.trainer_runs import CASES, QUIET, ROWS, fit, fits, quiet
from tests.support.user_modules import Means

STAGES, RANKS = 4, 2
NAMES = (
    "micro_batches", "accumulated", "options", "interleaved", "recomputed", "two_loss_ranks",
    "finetuned_stream", "hooks", "averaged", "bf16_mixed_overfit_batches", "double",
)  # fmt: skip
"""Cases of `tests.support.trainer_runs`; the first one runs in a small setting."""
LIVES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b", "micro_batches": 3, "stages": STAGES},
    "interleaved": {"schedule": "interleaved", "micro_batches": 4, "stages": STAGES},
    "zero_bubble": {"schedule": "zero_bubble", "micro_batches": 4, "stages": RANKS},
    "gpipe, recompute": {"schedule": "gpipe", "micro_batches": 3, "recompute": "always", "stages": RANKS},
    "streamed evaluation": {"schedule": "1f1b", "micro_batches": 1, "stages": RANKS},
    "pipedream": {"schedule": "pipedream", "micro_batches": 1, "stages": RANKS},
}
"""Strategies; all but the last one train as one device does."""

SINGLE = 1e-6
"""Between a float32 metric of a CPU and of a GPU: a few units in its last place."""


def run(setting: Setting) -> Iterator[Finding]:
    """A row for each case and strategy."""
    quiet()
    names = NAMES[:1] if setting.small else NAMES
    for name, strategy in list(LIVES.items())[: 1 if setting.small else None]:
        yield compared(f"{name}, one rank: fit, validate, predict, resume", partial(_one_rank, strategy))
    if setting.devices < RANKS:
        yield not_run("ranks with a device each", "there is one device")
        return
    for backend in ("gloo", "nccl"):
        for name, strategy in list(LIVES.items())[: 1 if setting.small else None]:
            label = f"{name}, {RANKS} ranks, {backend}: fit, validate, predict, resume"
            yield compared(label, partial(_several_ranks, strategy, backend))
        for name in names:
            yield compared(f"{name}, {RANKS} ranks, {backend}", partial(_case, name, backend), "one device")


def _one_rank(strategy: Mapping[str, Any]) -> list[str]:
    return _differences(life("gpu", 1, strategy), _expected(1, strategy), _metrics(strategy))


def _several_ranks(strategy: Mapping[str, Any], backend: str) -> list[str]:
    options = {"accelerator": "gpu", "strategy": {**strategy, "process_group_backend": backend}}
    found = processes.run_trainers(_life_of_a_rank, RANKS, **options)
    expected = _expected(RANKS, strategy)
    return [difference for each in found for difference in _differences(each, expected, _metrics(strategy))]


def _life_of_a_rank(process: int, accelerator: str, strategy: Mapping[str, Any]) -> dict[str, Any]:
    quiet()
    return life(accelerator, RANKS, strategy)


def _metrics(strategy: Mapping[str, Any]) -> float:
    """The tolerance of metrics: torchmetrics computes some in float32, which CPUs and GPUs round differently."""
    return SINGLE if strategy["schedule"] == "pipedream" else oracle.TOLERANCE


def _expected(ranks: int, strategy: Mapping[str, Any]) -> dict[str, Any]:
    if strategy["schedule"] == "pipedream":  # which trains otherwise: beside the same on CPUs
        options = {"accelerator": "cpu", "strategy": strategy}
        return life("cpu", 1, strategy) if ranks == 1 else processes.run_trainers(_life_of_a_rank, ranks, **options)[0]
    return life("gpu", 1, None)


def life(accelerator: str, devices: int, strategy: Mapping[str, Any] | None) -> dict[str, Any]:
    """Train, save, validate, predict, and go on from the checkpoint; what is left, in numbers.

    Args:
        accelerator: of the Trainer.
        devices: of the Trainer.
        strategy: arguments of the strategy; ``None``: a plain Trainer.
    """
    L.seed_everything(7, verbose=False)
    module = Means().double()
    module.hparams.optimizer = "sgd"  # without a schedule of as many steps as the first run has
    flushes = strategy is None or strategy["schedule"] != "pipedream"

    def trainer(epochs: int) -> L.Trainer:
        chosen = "auto" if strategy is None else PipeStrategy(**strategy)
        options = {"gradient_clip_val": 0.3 if flushes else None, "num_sanity_val_steps": 1, **QUIET}
        return L.Trainer(accelerator=accelerator, devices=devices, strategy=chosen, max_epochs=epochs, **options)

    with tempfile.TemporaryDirectory() as folder:
        first = trainer(1)
        first.fit(module, datamodule=Data(ROWS))
        # on all ranks the path of the first one
        path = first.strategy.broadcast(str(Path(folder, "life.ckpt")))
        first.save_checkpoint(path)
        found: dict[str, Any] = {"first": oracle.state_of(module)}
        found["validated"] = first.validate(module, datamodule=Data(ROWS), verbose=False)
        if flushes:
            predicted = first.predict(module, datamodule=Data(ROWS))
            found["predicted"] = [each.cpu() for each in predicted or []]
        second = trainer(2)
        second.fit(module, datamodule=Data(ROWS), ckpt_path=path)
        found["second"], found["metrics"] = oracle.state_of(module), oracle.numbers(second.callback_metrics)
        second.strategy.barrier()
    return moved(found)


def moved(found: dict[str, Any]) -> dict[str, Any]:
    """Everything on the host."""
    for name in ("first", "second"):
        found[name] = {key: value.cpu() for key, value in found[name].items()}
    return found


def _differences(found: dict[str, Any], expected: dict[str, Any], metrics: float) -> list[str]:
    differences = []
    for name in ("first", "second"):
        traces = [oracle.Trace(weights=each[name]) for each in (found, expected)]
        differences += [f"{name}: {each}" for each in oracle.differences(*traces)]
    traces = [
        oracle.Trace(metrics={**each["metrics"], **(each["validated"][0] if each["validated"] else {})})
        for each in (found, expected)
    ]
    differences += oracle.differences(*traces, metrics)
    predictions = [each.get("predicted") for each in (found, expected)]
    if predictions[0] and not all(bool(torch.equal(*pair)) for pair in zip(*map(_of, predictions), strict=True)):
        differences.append("predictions differ")
    return differences


def _of(predictions: list[Tensor] | None) -> list[Tensor]:
    return predictions or []


def _case(name: str, backend: str) -> list[str]:
    expected = fit(CASES[name], None, "gpu")
    options = {"accelerator": "gpu", "backend": backend}
    found = processes.run_trainers(fits, RANKS, names=[name], devices=RANKS, **options)
    differences = []
    for of_process in found:
        outcome = of_process[name]
        if outcome.error:
            return [outcome.error.splitlines()[-1]]
        differences += oracle.differences(
            moved_trace(outcome.trace), moved_trace(expected.trace), CASES[name].tolerance
        )
    return differences
