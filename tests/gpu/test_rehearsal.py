"""What `make gpu` runs, on the fake device: rehearsed, and no result of a GPU."""

from __future__ import annotations

import importlib

import pytest

from tests.benchmarks.measure import Finding
from tests.gpu import rehearsal
from tests.gpu.rehearsal import NOT_REHEARSABLE, rehearsed, verdict
from tests.gpu.runner import PARTS, ROOT, chosen
from tests.gpu.setting import Setting
from tests.support.fake_cuda.call import rehearse


def wrong(rows: list[Finding]) -> list[str]:
    return [f"{row.name}: {verdict(row)}" for row in rows if verdict(row).startswith("WRONG")]


def rows_of(name: str) -> list[Finding]:
    return list(importlib.import_module(f"tests.gpu.{name}").run(Setting(small=True)))


@pytest.mark.rehearsed
def test_a_small_part_is_rehearsed() -> None:
    """In the process of all short rehearsals; slow tests run each part in one of its own."""
    rows = rehearse(rows_of, "named_devices")
    assert {verdict(row) for row in rows} == {"equal"}, wrong(rows)


@pytest.mark.rehearsed
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_part_is_rehearsed(part: rehearsal.Part) -> None:
    rows = rehearsed(part)
    assert rows
    assert wrong(rows) == []
    # a row that can be rehearsed now leaves the list
    listed = {row.name for row in rows} & set(NOT_REHEARSABLE)
    assert [name for name in listed if verdict(next(row for row in rows if row.name == name)) == "equal"] == []


@pytest.mark.rehearsed
@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_rank", "nccl", "shared_device", "trainers"])
def test_no_code_of_the_host_touches_device_memory(name: str) -> None:
    (part,) = chosen([name])
    rows = rehearsed(part, small=True, protects=True)
    assert {verdict(row) for row in rows} == {"equal"}, wrong(rows)


def test_no_page_calls_a_rehearsal_a_result() -> None:
    text = (ROOT / "docs" / "developing.md").read_text()
    assert "<!-- rehearsed -->" in text
    assert "no GPU" in text.split("<!-- rehearsed -->")[0].rsplit("##", 1)[1]
    assert "rehears" not in (ROOT / "docs" / "results.md").read_text()
