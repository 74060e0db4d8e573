"""The tests that are marked ``gpu``."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator

from tests.benchmarks.measure import Finding
from tests.gpu.rows import not_run
from tests.gpu.runner import ROOT
from tests.gpu.setting import Setting

_NEEDED = ("pytest", "pytest_timeout")
_RESULT = re.compile(r"^(tests/\S+::\S+) (PASSED|FAILED|ERROR|SKIPPED)")


def run(setting: Setting) -> Iterator[Finding]:
    """A row for each of them."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        yield not_run("tests marked gpu", f"{', '.join(missing)} is missing")
        return
    # named, so that nothing else is imported; a test sees to it that the list is complete
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", *files()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            found = _RESULT.match(line)
            if found is not None:
                yield row(*found.groups())
    if process.returncode:
        print("".join(lines[-60:]), flush=True)


def row(test: str, outcome: str) -> Finding:
    """The row of one test."""
    return Finding(test, outcome.lower(), "passed", {"PASSED": True, "SKIPPED": None}.get(outcome, False))


def files() -> list[str]:
    """The modules with such tests."""
    return sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text()
    )
