"""The table of the page of results: it is that of the file, and it names what was missed."""

from __future__ import annotations

from tests.gpu.page import PAGE, lines, written
from tests.gpu.runner import PARTS

CONDITIONS = {"devices": "1 x a device", "torch": "2.11", "date": "2026-11-26"}


def test_the_page_has_what_the_file_holds() -> None:
    assert written(PAGE.read_text()) == PAGE.read_text()


def test_rows_that_are_not_equal_stand_by_themselves() -> None:
    rows = [
        {"name": "a", "value": "equal", "target": "1e-9", "reached": True},
        {"name": "tests/t.py::b", "value": "passed", "target": "passed", "reached": True},
        {"name": "c", "value": "0.8 of it", "target": "0.97", "reached": False},
        {"name": "d", "value": "3 MiB", "target": "", "reached": None},
        {"name": "e", "value": "NOT RUN: one device", "target": "", "reached": None},
    ]
    found = {PARTS[0].name: {"status": "interrupted", "rows": rows, "conditions": CONDITIONS}}
    _, _, first, second, *_ = lines(found)
    cells = "2 equal<br>c: 0.8 of it (0.97), **missed**<br>d: 3 MiB<br>e: NOT RUN: one device<br>(interrupted)"
    assert first == f"| {PARTS[0].title} | {cells} | 1 x a device, 2.11, 2026-11-26 |"
    assert second == f"| {PARTS[1].title} | not run | |"
