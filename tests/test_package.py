"""What the package offers under its own name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import lightning_pipe
from tests.versions import ENVIRONMENTS

ROOT = Path(__file__).parents[1]


def test_every_public_name_is_there_and_documented() -> None:
    for name in lightning_pipe.__all__:
        value = getattr(lightning_pipe, name)
        assert isinstance(value, str) or value.__doc__, name
        assert name in dir(lightning_pipe)


def test_the_version_has_one_source() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", lightning_pipe.__version__)
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    assert 'path = "lightning_pipe/version.py"' in project
    assert f"## {lightning_pipe.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_the_workflow_runs_what_ci_runs_on_the_supported_versions() -> None:
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    assert "run: .ci/run" in workflow
    assert " ".join(ENVIRONMENTS["oldest"].requirements) in " ".join(workflow.split())
    pythons = re.search(r'requires-python = ">=(3\.\d+),<3\.(\d+)"', project)
    assert pythons
    assert re.search(rf'python: "{re.escape(pythons[1])}"\s+versions: oldest', workflow)
    assert f'python: "3.{int(pythons[2]) - 1}", versions: newest' in workflow


def test_the_version_costs_no_heavy_import() -> None:
    code = (
        "import sys, lightning_pipe; lightning_pipe.__version__; assert not {'torch', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_no_module_is_left_out_of_the_wheel() -> None:
    folders = {path.parent for part in ("lightning_pipe", "tests") for path in (ROOT / part).rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []
    # hatchling and ruff skip what .gitignore names, even where git itself knows the files
    modules = [str(path.relative_to(ROOT)) for path in (ROOT / "lightning_pipe").rglob("*.py")]
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin"],
        input="\n".join(modules), capture_output=True, text=True, cwd=ROOT, check=False, timeout=30,
    )  # fmt: skip
    assert ignored.stdout.split() == []
