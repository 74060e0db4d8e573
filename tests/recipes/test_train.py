"""The command line from end to end, in processes of its own."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from logging import LogRecord
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from recipes import command_line, train
from tests.recipes.conftest import ROOT, command, write_text
from tests.support.pairs import slow_but
from tests.support.process_groups import process_group

SMALL = [
    "experiment=gpt2_wikitext2",
    "data.vocabulary=300",
    "data.block_length=16",
    "data.batch_size=8",
    "model.width=32",
    "model.layers=2",
    "model.heads=2",
    "optim.lr=1e-2",
    "trainer.limit_train_batches=8",
    "trainer.limit_val_batches=1",
]


def run(
    tmp_path: Path, *arguments: str, seconds: float = 200, by: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m recipes.train` on small local text; no process of it outlives the test."""
    environment = {name: value for name, value in os.environ.items() if name not in command_line.RANK_VARIABLES}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    text = [f"data.files={write_text(tmp_path / 'wiki')}", f"paths.data={tmp_path / 'data'}"]
    command = [sys.executable, *by, "-m", "recipes.train", *arguments, *text]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with process_group(command, cwd=ROOT, env=environment, **pipes) as process:
        try:
            out, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, errors = process.communicate()
            pytest.fail(f"not done after {seconds} s\n{out}\n{errors}")
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def summary(output: Path) -> dict[str, dict[str, float]]:
    return json.loads((output / "summary.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("processes", slow_but([1, 2], 2))
def test_two_processes_train_and_one_device_goes_on(processes: int, tmp_path: Path) -> None:
    """One process starts the second one, which imports for long; on one device the run is resumed."""
    output, further = tmp_path / "out", tmp_path / "further"
    text = [f"data.files={write_text(tmp_path / 'wiki')}", f"paths.data={tmp_path / 'data'}"]
    arguments = [*SMALL, "pipe.compare_losses=false", f"hydra.run.dir={output}", *text]
    done = command("recipes.train", ROOT, arguments, timeout=200, processes=processes)
    assert done.value == 0, done.output + done.trace
    first = summary(output)
    assert first["after"]["val_perplexity"] < first["before"]["val_perplexity"] / 2
    for name in (
        "checkpoints/last.ckpt",
        "metrics.csv",
        "curve.png",
        "config.yaml",
        "train.log",
        "timeline.png",
    ):
        assert (output / name).stat().st_size > 0, name
        assert name in done.output
    assert "before training" in done.output
    with (output / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["val_loss"]] == ["0", "3", "7"]
    log = (output / "train.log").read_text()
    assert f"the files in {tmp_path / 'wiki'}" in log
    assert log.count("Pipeline of GPT2") == done.output.count("Pipeline of GPT2") == 1
    assert summary(output)["commit"]

    checkpoint = output / "checkpoints" / "last.ckpt"
    arguments = ["trainer.max_epochs=2", "debug=one_device", f"ckpt_path={checkpoint}", f"hydra.run.dir={further}"]
    goes_on = command("recipes.train", tmp_path, [*SMALL, *arguments, *text])
    assert goes_on.value == 0, goes_on.output + goes_on.trace
    second = summary(further)
    assert second["before"]["val_loss"] == pytest.approx(first["after"]["val_loss"], rel=1e-5)
    assert second["after"]["val_loss"] < second["before"]["val_loss"]


def test_a_failed_run_has_its_reason_in_its_log(monkeypatch: pytest.MonkeyPatch, logged: list[LogRecord]) -> None:
    def fail(settings: Any) -> float:
        raise ZeroDivisionError("not foreseen")

    monkeypatch.setattr(train, "run", fail)
    with pytest.raises(ZeroDivisionError):
        train.train.__wrapped__(OmegaConf.create())
    (record,) = [record for record in logged if record.name == "recipes.printed"]
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "not foreseen"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_sweep_by_torchrun(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    arguments = ["-m", *SMALL, "pipe=gpipe,1f1b", "debug=fast", f"hydra.sweep.dir={folder}"]
    by = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(tmp_path, *arguments, seconds=300, by=by)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (summary(folder / str(job))["after"]["val_loss"] for job in (0, 1))
    assert first == pytest.approx(second, rel=1e-5)


@pytest.mark.parametrize(
    ("argument", "words", "left"),
    [
        ("model.widht=3", "Did you mean model.width?", []),
        pytest.param("experiment=gpt3", "gpt2_wikitext2", [], marks=pytest.mark.slow),
        # Hydra has begun the job by then, with its log
        pytest.param("trainer=gpu", "Here: trainer=cpu", ["out"], marks=pytest.mark.slow),
    ],
)
def test_a_mistake_is_one_clear_message(tmp_path: Path, argument: str, words: str, left: list[str]) -> None:
    done = command("recipes.train", tmp_path, ["experiment=gpt2_wikitext2", argument, "hydra.run.dir=out"])
    assert done.error is None, done.trace
    told = f"{done.output}{done.value}"  # the interpreter prints the words that a program ends with
    assert words in told
    assert done.value == 1 or isinstance(done.value, str)
    assert "Traceback" not in told
    assert [path.name for path in tmp_path.iterdir()] == left


@pytest.mark.parametrize("module", slow_but(["recipes.train", "recipes.plan"], "recipes.train"))
def test_the_whole_configuration_is_printed_and_nothing_runs(tmp_path: Path, module: str) -> None:
    done = command(module, tmp_path, ["experiment=gpt2_wikitext2", "hydra.run.dir=out", "--cfg", "job", "--resolve"])
    assert done.value == 0, done.trace
    printed = yaml.safe_load(done.output)
    assert printed["paths"]["output"] == "out"
    assert printed["callbacks"]["curve"]["path"] == "out/curve.png"
    assert printed["model"]["vocabulary"] == printed["data"]["vocabulary"] == 2048
    assert list(tmp_path.iterdir()) == []
