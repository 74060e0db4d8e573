"""The page of what works under a pipeline, made of the tests that say so: ``python -m tests.support.matrix``.

A test says it by a mark, ``@pytest.mark.feature(area, feature, verdict, how)``. Several tests may speak of one feature.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "matrix.md"
AREAS = (
    "Trainer arguments",
    "Hooks",
    "Callbacks",
    "Loggers",
    "Profilers",
    "Data loaders",
    "Precision",
    "Optimizers and schedulers",
    "Checkpoints",
    "Plugins",
    "Command line and Tuner",
)
VERDICTS = ("works", "differs", "not run", "refused")
_HEAD = """\
# What works, feature by feature

Every row is made of the tests that it names: `python -m tests.support.matrix` writes this page. *Works* means that a
test compares the feature with one device, or with what it says of itself. *Differs* and *refused* say how.
*Not run* means that the feature needs what the tests do not have.
[Limits](limits.md) has the reasons.
"""


@dataclass(frozen=True)
class Claim:
    """What one test says of a feature.

    Args:
        area: one of `AREAS`.
        feature: its name.
        verdict: one of `VERDICTS`.
        how: in what it differs, or what the refusal says; empty where it works.
        test: as pytest names it; without parameters where several of them say the same.
    """

    area: str
    feature: str
    verdict: str
    how: str
    test: str


class _Collected:
    """A plugin that keeps what pytest has found."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Keep the tests."""
        self.items = list(session.items)


def collected() -> list[pytest.Item]:
    """The tests of all files that speak of features, not run."""
    plugin = _Collected()
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.feature(" in path.read_text()]
    command = ["--collect-only", "-q", "-s", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    with redirect_stdout(StringIO()) as said:
        code = pytest.main([*command, *files], plugins=[plugin])
    assert code == pytest.ExitCode.OK, said.getvalue()[-2000:]
    return plugin.items


def claims(items: Iterable[pytest.Item]) -> list[Claim]:
    """What tests say of features, each once."""
    found: dict[tuple[str, ...], list[str]] = {}
    for item in items:
        for mark in item.iter_markers("feature"):
            area, feature, verdict, *how = mark.args
            function = item.nodeid.split("[")[0]
            found.setdefault((area, feature, verdict, "".join(how), function), []).append(item.nodeid)
    return [Claim(*said[:4], said[4] if len(tests) > 1 else tests[0]) for said, tests in found.items()]


def page(found: Iterable[Claim]) -> str:
    """The page: a table for each area, a row for each feature."""
    rows: dict[tuple[str, str], list[Claim]] = {}
    for claim in found:
        rows.setdefault((claim.area, claim.feature), []).append(claim)
    parts = [_HEAD]
    for area in AREAS:
        parts.append(f"\n## {area}\n\n| feature | | how | test |\n|---|---|---|---|\n")
        for (_, feature), said in sorted((key, said) for key, said in rows.items() if key[0] == area):
            verdict = max((claim.verdict for claim in said), key=VERDICTS.index)
            how = "; ".join(dict.fromkeys(claim.how for claim in said if claim.how)) or "as on one device"
            # file and test apart: a line breaks between them
            tests = ", ".join(dict.fromkeys("`{}` `{}`".format(*claim.test.split("::", 1)) for claim in said))
            parts.append(f"| {feature} | {verdict} | {how} | {tests} |\n")
    return "".join(parts)


def required() -> Iterator[tuple[str, str]]:
    """The areas and names that need a row: whatever Lightning has of each kind."""
    import lightning as L
    from lightning.pytorch import callbacks, loggers, plugins, profilers

    yield from (
        ("Trainer arguments", name) for name in inspect.signature(L.Trainer.__init__).parameters if name != "self"
    )
    yield from (("Callbacks", name) for name in callbacks.__all__)
    yield from (("Loggers", name) for name in loggers.__all__)
    yield from (("Profilers", name) for name in profilers.__all__)
    for name in plugins.__all__:
        yield ("Precision" if name.endswith("Precision") else "Plugins"), name


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(claims(collected())))
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
