"""The plan of the package: rooms on levels, arrows downwards, no circle; sizes that stay readable."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.mirrors import ELSEWHERE, modules_with_tests
from tests.support.structure import ROOT, Structure, patches, private_names, report, room

OPTIONS = {"PipeStrategy"}
"""Classes that hold the user's options, one attribute each."""
MOST_ATTRIBUTES = 15
MOST_LINES = 400
LONGER = {"lightning_pipe.trainer.strategy": 580}
"""One class, as Lightning's own strategies are: its options are 140 lines, and Lightning asks 45 things."""
BUDGET = {
    "intercept": 6265,
    "trainer": 5727,
    "engine": 3380,
    "schedules": 3080,
    "planning": 2350,
    "transport": 2000,
    "parameters": 1695,
    "construction": 1500,
    "partition": 1230,
    "simulate": 1150,
    "sharding": 1040,
    "batches": 1165,
    "profiling": 730,
    "plain": 840,
    "skip": 420,
}
"""Lines of a room at most. The numbers go down; one goes up for a new capability alone, which its commit names."""
MOST_CLASSES, MOST_PRIVATE_NAMES, MOST_PATCHES = 268, 107, 28
"""In the whole package: classes, private names of other packages, places that replace some of theirs for a time."""
MOST_RECIPES = 8500
"""Lines of `recipes/`."""
SLACK = 1.03
"""A budget that is further than this above its room is to be lowered."""


@pytest.fixture(scope="module")
def structure() -> Structure:
    return Structure()


def test_imports_lead_downwards(structure: Structure) -> None:
    assert structure.upward() == []


def test_no_modules_import_each_other(structure: Structure) -> None:
    assert structure.circles() == []


def test_lightning_is_imported_by_the_glue_alone(structure: Structure) -> None:
    found = {name for name, tree in structure.trees.items() if {"lightning", "pytorch_lightning"} & _packages(tree)}
    assert {room(name) for name in found} <= {"trainer", "callbacks", "lightning_internals"}


def test_schedules_and_simulations_need_no_torch(structure: Structure) -> None:
    found = {name for name, tree in structure.trees.items() if "torch" in _packages(tree)}
    assert not {room(name) for name in found} & {"schedules", "simulate", "config", "text", "errors", "cli"}


def test_modules_stay_readable(structure: Structure) -> None:
    lines = {name: source.count("\n") for name, source in structure.sources.items()}
    assert {name: count for name, count in lines.items() if count > LONGER.get(name, MOST_LINES)} == {}


def test_rooms_keep_their_budget(structure: Structure) -> None:
    lines = structure.lines()
    assert {name: count for name, count in lines.items() if count > BUDGET.get(name, MOST_LINES)} == {}
    assert {name: most for name, most in BUDGET.items() if most > SLACK * lines.get(name, 0)} == {}, "to be lowered"


def test_the_package_keeps_its_budget(structure: Structure) -> None:
    assert structure.classes() <= MOST_CLASSES
    assert private_names() <= MOST_PRIVATE_NAMES
    assert patches(structure) <= MOST_PATCHES


def test_recipes_keep_their_budget() -> None:
    assert sum(path.read_text().count("\n") for path in (ROOT / "recipes").rglob("*.py")) <= MOST_RECIPES


def test_classes_stay_small(structure: Structure) -> None:
    counts = {name: count for name, count in structure.attributes.items() if name.rsplit(".", 1)[1] not in OPTIONS}
    assert {name: count for name, count in counts.items() if count > MOST_ATTRIBUTES} == {}


def test_a_circle_and_an_arrow_upwards_are_found(tmp_path: Path) -> None:
    for path, source in {
        "engine/a.py": "def f():\n    from lightning_pipe.trainer.b import g\n",
        "trainer/b.py": "from lightning_pipe.engine import a\n",
    }.items():
        (tmp_path / "lightning_pipe" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lightning_pipe" / path).write_text(source)
        (tmp_path / "lightning_pipe" / path).with_name("__init__.py").write_text("")
    structure = Structure(tmp_path)
    assert structure.circles() == [["lightning_pipe.engine.a", "lightning_pipe.trainer.b"]]
    assert structure.upward() == ["lightning_pipe.engine.a imports lightning_pipe.trainer.b"]


def test_every_module_has_its_tests() -> None:
    assert [module for module, tests in modules_with_tests() if tests is None] == []


def test_the_table_of_tests_elsewhere_is_true() -> None:
    used = {(module, tests) for module, tests in modules_with_tests()}
    assert [pair for pair in ELSEWHERE.items() if pair not in used] == [], "modules with a mirror, or no modules"
    assert [tests for tests in ELSEWHERE.values() if not (ROOT / "tests" / tests).exists()] == []


def test_the_report_names_every_room(structure: Structure) -> None:
    printed = report(structure)
    assert all(f"  {name} (" in printed for name in {room(module) for module in structure.imports})


def _packages(tree: ast.Module) -> set[str]:
    """The packages that are imported when the module is."""
    return {
        name.split(".")[0]
        for node in tree.body
        for name in (
            [node.module]
            if isinstance(node, ast.ImportFrom) and node.module
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
