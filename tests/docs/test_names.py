"""File names, dotted names and options that pages and docstrings mention exist."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_pipe
from tests.docs.blocks import NAMED, ROOT, blocks
from tests.support.structure import LEVELS

FOLDERS = ("lightning_pipe", "tests", "recipes", "examples", "docs", "conf", ".github", ".ci")
LIBRARIES = ("lightning_pipe", "recipes", "tests", "torch", "lightning", "torchmetrics")
DIRECTIVE = re.compile(r"^\.\. auto\w+:: (\S+)(?:\n +:members: (.+))?", re.MULTILINE)
DOTTED = re.compile(rf"(?<![\w./-])(?:{'|'.join(LIBRARIES)})(?:\.\w+)+")
SOURCES = [
    path for folder in ("lightning_pipe", "recipes", "examples", "tests") for path in (ROOT / folder).rglob("*.py")
]


def spans(page: Path) -> Iterator[str]:
    """What stands in backquotes, outside blocks."""
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        text = text.replace(block.text, "")
    yield from re.findall(r"`([^`\n]+)`", text)


def exists(name: str) -> bool:
    """Whether a dotted name leads to a module, or to something in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("page", NAMED, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_exist(page: Path) -> None:
    """Paths from the repository's root. On the page for developers every file is named by its whole path."""
    whole = page.name == "developing.md"
    for span in spans(page):
        path = re.split(r"[\s:*<]", span)[0]
        from_root = "/" in path and path.split("/")[0] in FOLDERS
        if from_root or (whole and re.fullmatch(r"[\w./-]+\.(py|txt|toml|md|yaml|yml|ini)", path)):
            assert (ROOT / path).exists(), f"{page.name}: {span}"


@pytest.mark.parametrize("page", NAMED, ids=lambda page: str(page.relative_to(ROOT)))
def test_dotted_names_exist(page: Path) -> None:
    found = {name for span in spans(page) for name in DOTTED.findall(span)}
    for block in blocks(page):
        if block.language == "{eval-rst}":
            for name, members in DIRECTIVE.findall(block.text):
                found |= {name, *(f"{name}.{member.strip()}" for member in members.split(",") if member.strip())}
    assert [name for name in sorted(found) if not exists(name) and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", NAMED, ids=lambda page: str(page.relative_to(ROOT)))
def test_roles_name_what_they_say(page: Path) -> None:
    for role, name in re.findall(r"{py:(func|class)}`([\w.]+)`", page.read_text(encoding="utf-8")):
        module, _, last = name.rpartition(".")
        found = getattr(importlib.import_module(module), last)
        assert inspect.isclass(found) if role == "class" else inspect.isfunction(found), f"{page.name}: {name}"


@pytest.mark.parametrize("page", NAMED, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_of_the_strategy_exist(page: Path) -> None:
    options = inspect.signature(lightning_pipe.PipeStrategy).parameters
    for span in spans(page):
        for arguments in re.findall(r"PipeStrategy\(((?:[^()]|\([^)]*\))*)", span):
            own = re.sub(r"\([^)]*\)", "", arguments)  # those of calls inside belong to others
            assert set(re.findall(r"(\w+)=", own)) <= set(options), f"{page.name}: {span}"


def test_the_rooms_stand_in_their_order() -> None:
    """The table for developers has every room, from top to bottom."""
    page = (ROOT / "docs" / "developing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`lightning_pipe/.*?) \|", page, re.MULTILINE)
    files = {name: level for level, names in enumerate(LEVELS) for name in names if not name.startswith("__")}
    told = [re.findall(r"`lightning_pipe/(\w+)", row) for row in rows]
    assert {name for names in told for name in names} == files.keys()
    levels = [files[name] for names in told for name in names]
    assert levels == sorted(levels)


def test_modules_that_commands_run_exist() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in NAMED)
    found = set(re.findall(r"python3? -m (\w[\w.]*\w)", text))
    assert found
    assert [name for name in sorted(found) if importlib.util.find_spec(name) is None] == []


def test_names_of_this_repository_in_docstrings_exist() -> None:
    """Those with a dot: ``tests.faults.running``, and what roles refer to."""
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in SOURCES
        for text in re.findall('"""(.*?)"""', path.read_text(encoding="utf-8"), re.DOTALL)
        for name in re.findall(r"(?<![\w./-])(?:lightning_pipe|recipes|tests)(?:\.\w+)+", text)
    }
    assert found
    assert [(path, name) for path, name in sorted(found) if not exists(name) and not (ROOT / name).exists()] == []


def test_modules_say_what_they_are() -> None:
    """All but the packages of tests, which are folders."""
    modules = [path for path in SOURCES if path.name != "__init__.py" or not path.is_relative_to(ROOT / "tests")]
    silent = [path for path in modules if not path.read_text(encoding="utf-8").startswith('"""')]
    assert [str(path.relative_to(ROOT)) for path in silent] == []
