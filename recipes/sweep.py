"""The table that a sweep ends with: what was varied, and what came of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from typing_extensions import override

from lightning_pipe.text import table
from recipes import command_line

RESULTS = ("val_loss", "samples_per_second", "bubble", "predicted_bubble", "seconds", "result")


class Table(Callback):
    """Prints one line per job when a sweep is over, and leaves the same as ``table.json`` in the sweep's folder."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    @override
    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if command_line.rank() > 0:  # the first process has the results of all
            return
        output = Path(config.hydra.runtime.output_dir)
        row: dict[str, Any] = dict(word.split("=", 1) for word in config.hydra.overrides.task)
        summary = output / "summary.json"
        if job_return.status is JobStatus.COMPLETED and summary.exists():
            row |= _results(json.loads(summary.read_text()))
        else:
            row["result"] = "failed"
        self.rows.append(row)

    @override
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if not self.rows:
            return
        Path(config.hydra.sweep.dir, "table.json").write_text(json.dumps(self.rows, indent=2) + "\n")
        columns = columns_of(self.rows)
        cells = [[_cell(row.get(column)) for column in columns] for row in self.rows]
        print(f"Results of the sweep\n{table(columns, cells)}")
        if failed := sum(row.get("result") == "failed" for row in self.rows):
            sys.exit(f"{failed} of {len(self.rows)} jobs failed; their logs are in {config.hydra.sweep.dir}.")


def columns_of(rows: list[dict[str, Any]]) -> list[str]:
    """What differs between jobs, and all results.

    Example:
        >>> columns_of([{"experiment": "a", "pipe": "gpipe", "val_loss": 2.0}, {"experiment": "a", "pipe": "1f1b"}])
        ['pipe', 'val_loss']
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [name for name in names if len({str(row.get(name)) for row in rows}) > 1 or name in RESULTS] or names


def _results(summary: dict[str, Any]) -> dict[str, Any]:
    known = {name: summary.get(name) for name in RESULTS[1:-1]}
    return {**summary["after"], **{name: value for name, value in known.items() if value is not None}}


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
