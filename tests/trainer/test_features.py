"""Features of Lightning that no other test is about: on two ranks they do what they do on one device."""

from __future__ import annotations

import csv
import math
import traceback
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch import callbacks, loggers, plugins, profilers
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import ConfigurationError
from tests.support.features import CASES, LOOKS, Runner, together
from tests.support.lit_modules import Lit
from tests.support.pairs import asked
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet
from tests.trainer.test_service_loggers import SERVICES

ZERO_ALONE = {
    "save_weights_only",
    *("ThroughputMonitor", "CSVLogger", "Logger"),
    *("default_root_dir", "ModelSummary", "RichModelSummary"),
}
"""What other processes than 0 do not see, as with every strategy."""

SLOW = {
    *("max_time", "min_epochs", "deterministic", "barebones", "LambdaCallback", "Timer", "BackboneFinetuning"),
    *("LearningRateFinder", "RichModelSummary", "RichProgressBar"),
    *("AdvancedProfiler", "PassThroughProfiler", "PyTorchProfiler"),
}
"""Further cases of a kind of which one is fast; "min_steps" ends by the time too."""

FLAG, CALLBACK, PROFILER, LOGGER = "Trainer arguments", "Callbacks", "Profilers", "Loggers"
MARKS: dict[str, list[tuple[str, ...]]] = {
    "max_steps": [(FLAG, "max_steps", "works")],
    "max_time": [(FLAG, "max_time", "works")],
    "min_steps": [(FLAG, "min_steps", "works")],
    "min_epochs": [(FLAG, "min_epochs", "works")],
    "check_val_every_n_epoch": [(FLAG, "check_val_every_n_epoch", "works")],
    "deterministic": [(FLAG, name, "works") for name in ("deterministic", "benchmark")],
    "barebones": [(FLAG, "barebones", "works")],
    "limits": [
        (FLAG, "limit_test_batches", "works"),
        (FLAG, "limit_predict_batches", "works"),
        (
            *(FLAG, "inference_mode", "works"),
            "evaluation steps run without gradients and outside of that mode, as Lightning itself does over Gloo and "
            "with FSDP",
        ),
    ],
    "default_root_dir": [(FLAG, name, "works") for name in ("default_root_dir", "enable_checkpointing")],
    "LearningRateFinder": [(CALLBACK, "LearningRateFinder", "works")],
    "Tuner": [("Command line and Tuner", "Tuner.lr_find", "works")],
    "ModelSummary": [(CALLBACK, "ModelSummary", "works"), (FLAG, "enable_model_summary", "works")],
    "TQDMProgressBar": [
        (CALLBACK, "TQDMProgressBar", "works"),
        (FLAG, "enable_progress_bar", "works"),
    ],
    "SimpleProfiler": [(PROFILER, "SimpleProfiler", "works"), (PROFILER, "Profiler", "works")],
    "Logger": [
        (LOGGER, "Logger", "works"),
        (FLAG, "enable_autolog_hparams", "works"),
        (FLAG, "logger", "works"),
        (FLAG, "log_every_n_steps", "works"),
    ],
    "save_weights_only": [("Checkpoints", "ModelCheckpoint(save_weights_only=True)", "works")],
    "CSVLogger": [(LOGGER, "CSVLogger", "works")],
    **{name: [(PROFILER, name, "works")] for name in CASES if name.endswith("Profiler")},
    "PyTorchProfiler": [(PROFILER, "PyTorchProfiler", "differs", "parts of layers have no names in its tables")],
}


def marked(name: str) -> Any:
    marks = [pytest.mark.feature(*mark) for mark in MARKS.get(name, [(CALLBACK, name, "works")])]
    return pytest.param(name, marks=[*marks, pytest.mark.slow] if name in SLOW else marks)


def run_cases(process: int, devices: int | None, folder: Path, names: list[str]) -> dict[str, Any]:
    """What each of some cases has seen; of several processes the traceback of the one at which this world ended."""
    found: dict[str, Any] = {}
    looks = {name: LOOKS[name] for name in names if name in LOOKS}
    for name in (*(name for name in names if name in CASES), *(["looks"] if looks else [])):
        runner = Runner(devices, folder / f"{name}-{process}")
        runner.folder.mkdir(parents=True)
        try:
            found |= together(runner, looks) if name == "looks" else {name: CASES[name](runner)}
        except BaseException:
            if devices is None:
                raise
            return found | dict.fromkeys(looks if name == "looks" else [name], traceback.format_exc())
    return found


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All cases that were asked for, on one device and in one world."""
    names, folder = asked(request, "name"), tmp_path_factory.mktemp
    two = run_trainers(run_cases, 2, timeout=110, devices=2, folder=folder("two"), names=names)
    return run_cases(0, None, folder("one"), names), two


@pytest.mark.parametrize("name", [marked(name) for name in (*CASES, *LOOKS)])
def test_equals_one_device(name: str, runs: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    one, two = runs
    assert one[name], "nothing was seen"
    for process, of_process in enumerate(two[: 1 if name in ZERO_ALONE else 2]):
        if name not in of_process:
            pytest.skip("an earlier case failed")
        assert not differences(of_process[name], one[name]), f"process {process}: {of_process[name]}"


def differences(found: Any, plain: Any) -> list[str]:
    """Where two values made of lists and dictionaries differ; numbers by more than ``1e-9``."""
    if isinstance(plain, dict) and isinstance(found, dict) and found.keys() == plain.keys():
        return [f"{key}: {line}" for key in plain for line in differences(found[key], plain[key])]
    if isinstance(plain, list | tuple) and isinstance(found, list | tuple) and len(found) == len(plain):
        return [line for pair in zip(found, plain, strict=True) for line in differences(*pair)]
    if isinstance(plain, float) and isinstance(found, float):
        same = math.isclose(found, plain, rel_tol=1e-9, abs_tol=1e-9)
    else:
        same = found == plain
    return [] if same else [f"{found!r} instead of {plain!r}"]


# ------------------------------------------------------------------ loggers of services


def service(name: str) -> Any:
    how = "needs its package and an account; tests see processes other than 0 alone, where it opens nothing"
    if name == "NeptuneLogger":
        how = "only some releases of Lightning 2.6 have it; as CometLogger"
    marks = [] if name in SERVICES else [pytest.mark.feature(LOGGER, name, "not run", how)]
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize(
    "logger", [service(f"{name}Logger") for name in ("Comet", "Lit", "MLFlow", "Neptune", "TensorBoard", "Wandb")]
)
def test_loggers_of_services_open_nothing_on_processes_other_than_0(
    logger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a logger hands out an experiment that does nothing, even one that knows neither package nor account."""
    kind = getattr(loggers, logger, None)
    if kind is None:
        pytest.skip(f"this version of Lightning has no {logger}")
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    experiment = kind.__new__(kind).experiment
    assert isinstance(experiment, _DummyExperiment)
    assert experiment.log({"loss": 1.0}) is None
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    with pytest.raises((AttributeError, ImportError)):  # what it needs to open one is not there
        _ = kind.__new__(kind).experiment


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            profilers.XLAProfiler,
            marks=pytest.mark.feature(PROFILER, "XLAProfiler", "refused", "by Lightning, without torch_xla"),
        ),
        pytest.param(
            plugins.XLACheckpointIO,
            marks=pytest.mark.feature("Plugins", "XLACheckpointIO", "refused", "by Lightning, without torch_xla"),
        ),
    ],
)
def test_what_needs_a_tpu_is_refused_by_lightning(make: type[Any]) -> None:
    with pytest.raises(ModuleNotFoundError, match="torch_xla"):
        make()


@pytest.mark.feature("Command line and Tuner", "Tuner.scale_batch_size", "refused", "on several ranks, as the callback")
def test_sizes_of_batches_are_not_searched() -> None:
    quiet()

    class Watching(PipeStrategy):
        @property
        def pipeline_parallel_size(self) -> int:
            return 2  # as where there are two processes

    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=Watching(), max_epochs=1, **QUIET)
    with pytest.raises(ConfigurationError, match="BatchSizeFinder tries sizes until memory runs out"):
        Tuner(trainer).scale_batch_size(Lit(), train_dataloaders=DataLoader([1]), max_trials=1)


@pytest.mark.feature(CALLBACK, "DeviceStatsMonitor", "works", "on each process, of its own device")
def test_statistics_of_the_device_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the statistics of a CPU need psutil
    monkeypatch.setattr(CPUAccelerator, "get_device_stats", lambda *_: {"device": 7.0})
    Runner(1, tmp_path).fit(
        callbacks=[callbacks.DeviceStatsMonitor(cpu_stats=True)], logger=loggers.CSVLogger(tmp_path)
    )
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open() as opened:
        seen = {row["DeviceStatsMonitor.on_train_batch_start/device"] for row in csv.DictReader(opened)}
    assert seen - {""} == {"7.0"}


@pytest.mark.feature(FLAG, "model_registry", "works", "Lightning keeps the name for its own callback")
def test_a_registry_is_passed_on(tmp_path: Path) -> None:
    trainer = Runner(1, tmp_path).fit(model_registry="team/model")
    assert trainer._model_registry == "team/model"  # type: ignore[attr-defined]
    assert trainer.global_step == 2
