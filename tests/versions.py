"""Runs the fast tests on the oldest and newest supported releases, each in an environment of its own.

``make test-versions`` runs all of them, ``make test-versions ARGS=newest`` one. An environment is made once, in
``.venv-versions/NAME``, and again when what it is to hold changes. Needs nothing but Python's standard library.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-versions"


class Environment(NamedTuple):
    """What the tests are run with: a Python, and releases that are not the newest within the bounds."""

    python: str
    requirements: tuple[str, ...] = ()


ENVIRONMENTS = {
    "oldest": Environment(
        "python3.11",
        (
            "torch==2.10.0",
            "lightning==2.6.0",
            "torchmetrics==1.4.0",
            "transformers==5.2.0",
            "numpy==1.26.0",
            "wrapt==1.16.0",
            "typing_extensions==4.10.0",
            "rich==13.0.0",
            "matplotlib==3.8.0",
            "pyarrow==20.0.0",  # of datasets; later ones want a newer numpy
        ),
    ),
    "middle": Environment("python3.12", ("torch==2.13.0",)),
    "newest": Environment("python3.13"),
}


def prepared(name: str, python: str) -> Path:
    """The Python of an environment, which is made if it is missing or holds something else."""
    folder = FOLDER / name
    wanted = "\n".join([python, *ENVIRONMENTS[name].requirements, (ROOT / "pyproject.toml").read_text()])
    noted, own = folder / "ready", folder / "bin" / "python"
    if not noted.exists() or noted.read_text() != wanted:
        print(f"{name}: setting up {folder}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", folder], check=True)
        install = [own, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*install, "--editable", ".[dev]", *ENVIRONMENTS[name].requirements], cwd=ROOT, check=True)
        noted.write_text(wanted)
    return own


def run(name: str, options: list[str]) -> str:
    """Run the tests in an environment; how it ended."""
    python = shutil.which(ENVIRONMENTS[name].python)
    if python is None or subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True).returncode:
        return f"skipped: no {ENVIRONMENTS[name].python} with its venv module on PATH"
    own = prepared(name, python)
    tests = ["-m", "pytest", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder", "-m", "not slow and not gpu"]
    ended = subprocess.run([own, *tests, *options], cwd=ROOT)
    return "passed" if ended.returncode == 0 else f"failed (pytest exited with {ended.returncode})"


def main(arguments: list[str]) -> int:
    """Run the named environments, or all, with other arguments for pytest; 1 unless all that could be run passed."""
    names = [argument for argument in arguments if argument in ENVIRONMENTS] or list(ENVIRONMENTS)
    options = [argument for argument in arguments if argument not in ENVIRONMENTS]
    ended = {name: run(name, options) for name in names}
    for name, how in ended.items():
        print(f"{name}: {how}")
    return int("passed" not in ended.values() or any(how.startswith("failed") for how in ended.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
