"""What `make gpu` runs, on the fake device: rehearsed, and no result of a GPU."""

from __future__ import annotations

import pytest

from tests.benchmarks.measure import Finding
from tests.gpu import rehearsal
from tests.gpu.rehearsal import NOT_REHEARSABLE, rehearsed, verdict
from tests.gpu.runner import PARTS, ROOT, chosen
from tests.support.pairs import slow_but


def wrong(rows: list[Finding]) -> list[str]:
    return [f"{row.name}: {verdict(row)}" for row in rows if verdict(row).startswith("WRONG")]


@pytest.mark.rehearsed
@pytest.mark.parametrize("name", slow_but(["named_devices", "one_rank", "delays", "nccl"], "named_devices"))
def test_a_small_part_is_rehearsed(name: str) -> None:
    (part,) = chosen([name])
    rows = rehearsed(part, small=True)
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
