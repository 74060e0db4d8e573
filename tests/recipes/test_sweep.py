"""The table at the end of a sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import OmegaConf

from recipes import train
from recipes.sweep import Table


def job_config(folder: Path, overrides: list[str]) -> Any:
    hydra = {"runtime": {"output_dir": str(folder)}, "overrides": {"task": overrides}, "sweep": {"dir": str(folder)}}
    return OmegaConf.create({"hydra": hydra})


def test_a_failed_run_has_its_reason_in_its_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(settings: Any) -> float:
        raise ZeroDivisionError("not foreseen")

    monkeypatch.setattr(train, "run", fail)
    mode = OmegaConf.create({"mode": RunMode.RUN})
    monkeypatch.setattr(train.HydraConfig, "get", lambda: mode)
    with pytest.raises(ZeroDivisionError):
        train.train.__wrapped__(OmegaConf.create())
    (record,) = [record for record in caplog.records if record.name == "recipes.printed"]
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "not foreseen"
    mode.mode = RunMode.MULTIRUN
    assert train.train.__wrapped__(OmegaConf.create()) == float("inf")


def test_a_sweep_ends_with_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    for number, pipe in enumerate(("gpipe", "1f1b")):
        folder = tmp_path / str(number)
        folder.mkdir()
        summary = {"after": {"val_loss": 2.0 + number}, "samples_per_second": 10.0, "bubble": None, "seconds": 5.0}
        (folder / "summary.json").write_text(json.dumps(summary))
        overrides = ["experiment=gpt2_wikitext2", f"pipe={pipe}"]
        table.on_job_end(job_config(folder, overrides), JobReturn(status=JobStatus.COMPLETED))
    table.on_job_end(
        job_config(tmp_path, ["experiment=gpt2_wikitext2", "pipe=gems"]), JobReturn(status=JobStatus.FAILED)
    )
    with pytest.raises(SystemExit, match="1 of 3 jobs failed"):
        table.on_multirun_end(job_config(tmp_path, []))
    lines = capsys.readouterr().out.splitlines()
    assert sum("gpt2_wikitext2" in line for line in lines) == 0, "what does not differ is left out"
    row = next(line for line in lines if "1f1b" in line)
    assert all(word in row for word in ("3", "10", "5"))
    assert "failed" in next(line for line in lines if "gems" in line)
    assert json.loads((tmp_path / "table.json").read_text())[1]["val_loss"] == 3.0


def test_other_processes_of_a_sweep_have_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    table = Table()
    table.on_job_end(job_config(tmp_path, ["pipe=gpipe"]), JobReturn(status=JobStatus.COMPLETED))
    table.on_multirun_end(job_config(tmp_path, []))
    assert not table.rows
