"""The pictures of README and docs are those that the command draws."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from docs import pictures
from tests.docs.blocks import PAGES


def test_every_picture_is_drawn_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pictures.FOLDER
    there = {path.name for path in folder.glob("*.png")}
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.main()
    assert {path.name for path in tmp_path.iterdir()} == there
    stale = [name for name in there if not np.array_equal(imread(folder / name), imread(tmp_path / name))]
    assert stale == [], "make pictures draws them again"
    shown = [
        (page.parent / name).resolve()
        for page in PAGES
        for name in re.findall(r"!\[.*\]\((.*\.png)\)", page.read_text())
    ]
    assert {path.name for path in shown if path.parent == folder.resolve()} == there
    assert all(path.is_file() for path in shown)  # those of the recipes' pages come from runs
