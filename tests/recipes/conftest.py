"""Small real text in WikiText's formats, and the composed configurations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from recipes import config

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
    from datasets import Dataset

    folder.mkdir(parents=True, exist_ok=True)
    for name, copies in (("train-00000-of-00001", train), ("validation-00000-of-00001", validation)):
        rows = (ARTICLE * copies).splitlines(keepends=True)
        Dataset.from_dict({"text": rows}).to_parquet(folder / f"{name}.parquet")
    return folder


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def composed() -> Callable[..., DictConfig]:
    """Composes and checks a configuration as the command line would."""
    config.register()

    def make(*overrides: str) -> DictConfig:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            settings = compose("train", ["paths.output=out", *overrides])
        config.check(settings)
        return settings

    return make
