"""The commit that a run notes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from recipes.provenance import commit


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    assert commit(tmp_path) == "unknown"
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    name = git(tmp_path, "rev-parse", "HEAD")
    assert commit(tmp_path) == name
    (tmp_path / "new.txt").write_text("")
    assert commit(tmp_path) == name
    (tmp_path / "code.py").write_text("2")
    assert commit(tmp_path) == f"{name} with changes"
