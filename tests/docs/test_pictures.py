"""The pictures of README and docs are those that the command draws."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from docs import pictures
from tests.docs.blocks import PAGES
from tests.support.pairs import slow_but

THERE = {path.name for path in pictures.FOLDER.glob("*.png")}


@pytest.mark.parametrize("simulated", slow_but([False, True], False))
def test_every_picture_is_drawn(simulated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the fast test one schedule, and what needs no further simulations."""
    folder = pictures.FOLDER
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    if not simulated:
        monkeypatch.setattr(pictures, "SCHEDULES", pictures.SCHEDULES[:1])
        for name in ("trade", "reproduced"):
            monkeypatch.setattr(pictures, name, lambda *_, **__: None)
    pictures.main()
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == THERE or not simulated
    stale = [name for name in drawn if not np.array_equal(imread(folder / name), imread(tmp_path / name))]
    assert stale == [], "make pictures draws them again"


def test_every_picture_is_used() -> None:
    shown = [
        (page.parent / name).resolve()
        for page in PAGES
        for name in re.findall(r"!\[.*\]\((.*\.png)\)", page.read_text())
    ]
    assert {path.name for path in shown if path.parent == pictures.FOLDER.resolve()} == THERE
    assert all(path.is_file() for path in shown)  # those of the recipes' pages come from runs
