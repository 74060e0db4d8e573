"""Small real text in WikiText's formats, and the composed configurations."""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from datasets import Dataset
from omegaconf import DictConfig

from recipes import config
from recipes.command_line import RANK_VARIABLES
from tests.support.processes import Outcome, outcomes

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"

ARTICLE = """ = Valkyria Chronicles III =

 Valkyria Chronicles III is a tactical role @-@ playing video game developed for the PlayStation Portable .

 = = Gameplay = =

 As with previous games , players take control of a military unit and take part in missions against enemy forces .
"""


def write_text(folder: Path, train: int = 40, validation: int = 10) -> Path:
    """Writes the text files of WikiText's archive."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "wiki.train.raw").write_text(ARTICLE * train)
    (folder / "wiki.valid.raw").write_text(ARTICLE * validation)
    return folder


def write_parquet(folder: Path, train: int = 40, validation: int = 10) -> Path:
    """Writes the parquet files that the hub serves: one row per line, with its line break."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, copies in (("train-00000-of-00001", train), ("validation-00000-of-00001", validation)):
        rows = (ARTICLE * copies).splitlines(keepends=True)
        Dataset.from_dict({"text": rows}).to_parquet(folder / f"{name}.parquet")
    return folder


def command(module: str, folder: Path, arguments: list[str], timeout: float = 60, processes: int = 1) -> Outcome:
    """What ``python -m module`` does in a folder; a forked process has the libraries that a fresh one imports first.

    One process starts the others of its run itself; with more ``processes`` a launcher has started them.
    The value is the code or the words that the first one ends with.
    """
    call = {"module": module, "folder": folder, "arguments": arguments, "alone": processes == 1}
    return outcomes(_command, processes, timeout=timeout, group_timeout=None, **call)[0]


def _command(process: int, module: str, folder: Path, arguments: list[str], alone: bool) -> str | int | None:
    ranks = (*RANK_VARIABLES, "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in ranks if alone else ():
        os.environ.pop(name, None)
    os.chdir(folder)
    sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code
    return 0


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What is logged meanwhile."""
    records: list[logging.LogRecord] = []
    root, handler = logging.getLogger(), logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield records
    root.setLevel(level)
    root.removeHandler(handler)


@pytest.fixture
def composed() -> Callable[..., DictConfig]:
    """Composes and checks a configuration as the command line would."""

    def make(*overrides: str) -> DictConfig:
        settings = config.composed(["paths.output=out", *overrides])
        config.check(settings)
        return settings

    return make
