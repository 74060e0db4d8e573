"""Loggers of services where these need no network; `make test-extras` installs them and runs these tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch import loggers

from tests.support.features import Runner
from tests.support.processes import run_trainers

Values = dict[str, list[float]]
RANKS = 2


def tensorboard(runner: Runner) -> Values:
    """The scalars of the file of events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = runner.folder / "events"
    runner.fit(logger=loggers.TensorBoardLogger(folder, name="", version=""))
    if not folder.exists():
        return {}
    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def mlflow(runner: Runner) -> Values:
    """The metrics of a database on this machine."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{runner.folder}/mlflow.db"
    logger = loggers.MLFlowLogger("trial", tracking_uri=uri)
    runner.fit(logger=logger)
    if logger._run_id is None:
        return {}
    client = MlflowClient(uri)
    names = client.get_run(logger.run_id).data.metrics
    return {name: [each.value for each in client.get_metric_history(logger.run_id, name)] for name in names}


def wandb(runner: Runner) -> Values:
    """The last values of a run that is not sent."""
    from wandb.sdk.wandb_run import Run

    logger = loggers.WandbLogger("trial", save_dir=runner.folder, offline=True)
    runner.fit(logger=logger)
    if not isinstance(logger.experiment, Run):
        return {}
    found = {name: [float(value)] for name, value in dict(logger.experiment.summary).items() if name[0] != "_"}
    logger.experiment.finish()
    assert list(runner.folder.glob("wandb/offline-run-*/run-*.wandb"))
    return found


SERVICES: dict[str, tuple[str, Callable[[Runner], Values]]] = {
    "TensorBoardLogger": ("tensorboard", tensorboard),
    "MLFlowLogger": ("mlflow", mlflow),
    "WandbLogger": ("wandb", wandb),
}
HOW = {
    "TensorBoardLogger": "as on one device; `make test-extras` runs it",
    "MLFlowLogger": "as on one device, with a database of its own; `make test-extras` runs it",
    "WandbLogger": "as on one device, offline; `make test-extras` runs it",
}


def logged(process: int, name: str, folder: Path) -> Values:
    """What a process of a pipeline has logged, in a folder of its own."""
    own = folder / f"process {process}"
    own.mkdir()
    return SERVICES[name][1](Runner(RANKS, own))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.feature("Loggers", name, "works", HOW[name])) for name in SERVICES]
)
def test_a_service_gets_what_one_device_logs(name: str, tmp_path: Path) -> None:
    package, alone = SERVICES[name]
    pytest.importorskip(package, reason=f"make test-extras installs {package}")
    folders = {devices: tmp_path / f"{devices}" for devices in (1, RANKS)}
    for folder in folders.values():
        folder.mkdir()
    expected = alone(Runner(None, folders[1]))
    first, *others = run_trainers(logged, RANKS, timeout=150, name=name, folder=folders[RANKS])
    assert {"train_loss_step", "val_loss", "epoch"} <= expected.keys()
    assert first.keys() == expected.keys()
    for metric, values in expected.items():
        assert first[metric] == pytest.approx(values, rel=1e-6), metric
    assert all(other == {} for other in others)
