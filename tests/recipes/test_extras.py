"""Loggers, sweepers and launchers of the extras; `make test-extras` installs them and runs all of these tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from recipes import config, job
from tests.recipes.conftest import CONF
from tests.recipes.test_train import SMALL, run
from tests.support.recipe_curves import compose_recipe, write_data

PLAIN = ["pipe=none", "trainer.devices=1", "debug=fast", "trainer.enable_progress_bar=false"]
LOGGERS = ("tensorboard", "wandb", "mlflow")
"""And the packages that they need. test_experiments has the one of CSV files, which needs none."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("logger", LOGGERS)
def test_a_logger_gets_the_configuration(logger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(logger, reason=f"make test-extras installs {logger}")
    out = tmp_path / "out"
    out.mkdir()
    further = [
        *PLAIN,
        f"logger={logger}",
        "tags=[first]",
        *(["logger.wandb.offline=true"] if logger == "wandb" else []),
    ]
    job.run(compose_recipe("gpt2_wikitext2", write_data(tmp_path), tmp_path, further))
    assert json.loads((out / "summary.json").read_text())["tags"] == ["first"]
    if logger == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(out / "tensorboard"))
        events.Reload()
        assert "val_loss" in events.Tags()["scalars"]
        assert "AdamW" in (out / "tensorboard" / "hparams.yaml").read_text()
    elif logger == "wandb":
        import wandb

        assert wandb.run is not None
        job.close_loggers()
        assert wandb.run is None
        assert list(out.glob("wandb/offline-run-*/run-*.wandb"))
    else:
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{out}/mlflow.db")
        (experiment,) = [one for one in client.search_experiments() if one.name == "gpt2_wikitext2"]
        (done,) = client.search_runs([experiment.experiment_id])
        assert done.data.params["config/optim/_target_"] == "torch.optim.AdamW"
        assert "val_loss" in done.data.metrics


@pytest.mark.timeout(400)
def test_optuna_chooses_what_a_sweep_tries(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="make test-extras installs hydra-optuna-sweeper")
    further = ["hparams_search=optuna", "hydra.sweeper.n_trials=2", "pipe=none", "trainer.devices=1", "debug=fast"]
    small = [word for word in SMALL if not word.startswith("optim.lr=")]  # what is given is not searched
    done = run(tmp_path, *small, *further, f"hydra.sweep.dir={tmp_path / 'sweep'}", seconds=350)
    assert done.returncode == 0, done.stdout + done.stderr
    best = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    assert 1e-4 <= best["best_params"]["optim.lr"] <= 1e-2


def test_a_sweep_can_be_given_to_slurm() -> None:
    reason = "make test-extras installs hydra-submitit-launcher"
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason=reason)
    config.register()
    given = ["experiment=gpt2_wikitext2", "hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        launcher = compose("train", given, return_hydra_config=True).hydra.launcher
    assert (launcher._target_.rpartition(".")[2], launcher.partition) == ("SlurmLauncher", "gpu")


@pytest.mark.timeout(400)
def test_submitit_runs_the_jobs_of_a_sweep(tmp_path: Path) -> None:
    reason = "make test-extras installs hydra-submitit-launcher"
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason=reason)
    further = ["hydra/launcher=submitit_local", "seed=1,2", "pipe=none", "trainer.devices=1", "debug=fast"]
    done = run(tmp_path, "-m", *SMALL, *further, f"hydra.sweep.dir={tmp_path / 'sweep'}", seconds=350)
    assert done.returncode == 0, done.stdout + done.stderr
    for number in range(2):
        assert json.loads((tmp_path / "sweep" / str(number) / "summary.json").read_text())["after"]["val_loss"] > 0
