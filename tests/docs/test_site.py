"""The site is built, without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT


@pytest.mark.slow
def test_the_site_is_built(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="`make docs` installs Sphinx")
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    words = ["-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "doctrees"), "docs", str(tmp_path / "html")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *words], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "html" / "api.html").read_text(encoding="utf-8")
    for name in ("PipeStrategy", "PipelineTimeline", "DeferredBatchNorm", "is_recomputing", "skippable", "OneFOneB"):
        assert name in api


def test_the_reference_names_everything_that_is_public() -> None:
    """What the package exports, or the module that holds it."""
    import lightning_pipe
    from lightning_pipe import schedules

    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for name in lightning_pipe.__all__:
        assert name in page or name == "__version__", name
    types_of_the_engine = {"Stream", "stream", "Placement"}
    for name in set(schedules.__all__) - types_of_the_engine:
        assert name in page, name
