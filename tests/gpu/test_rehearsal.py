"""What `make gpu` runs, on the fake device: rehearsed, and no result of a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.benchmarks.measure import Finding
from tests.gpu import rehearsal
from tests.gpu.rehearsal import NOT_REHEARSABLE, rehearsed, table, verdict
from tests.gpu.runner import PARTS, ROOT, chosen
from tests.support.pairs import slow_but


def wrong(rows: list[Finding]) -> list[str]:
    return [f"{row.name}: {verdict(row)}" for row in rows if verdict(row).startswith("WRONG")]


@pytest.mark.rehearsed
@pytest.mark.parametrize("name", slow_but(["named_devices", "nccl"], "named_devices"))
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


def test_the_list_of_what_cannot_be_rehearsed_does_not_grow() -> None:
    assert sorted(set(NOT_REHEARSABLE.values())) == ["CUPTI", "Triton", "_thnn_fused_lstm_cell"]
    assert len(NOT_REHEARSABLE) == 3


def test_verdicts() -> None:
    lstm = Finding("recurrent, 1f1b-s4-m3-d1", "NotImplementedError: _thnn_fused_lstm_cell", "equal", False)
    other = Finding("recurrent, 1f1b-s4-m3-d1", "weight is off by 1", "equal", False)
    assert verdict(lstm) == "not rehearsable"
    assert verdict(other) == "WRONG: weight is off by 1"
    assert verdict(Finding("a", "equal", "", True)) == "equal"
    assert verdict(Finding("a", "1 s")) == "ran"
    assert verdict(Finding("a", "NOT RUN: no device")) == "not run"
    text = table({"one_rank": [lstm, Finding("a", "equal", "", True), Finding("b", "equal", "", True)]})
    assert "| `one_rank` | 2 equal | recurrent: `_thnn_fused_lstm_cell` |" in text


def test_a_rehearsal_leaves_results_and_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)

    def run_part(part: rehearsal.Part, **setting: object) -> tuple[str, list[Finding]]:
        assert os.environ["FAKE_CUDA_DEVICES"] == "2"
        return "ended after 9 s", [Finding("a", "equal", "", True)]

    monkeypatch.setattr(rehearsal, "run_part", run_part)
    monkeypatch.setattr(rehearsal, "environment", lambda *_, **__: {"FAKE_CUDA_DEVICES": "2"})
    rows = rehearsed(PARTS[0])
    assert [verdict(row) for row in rows] == ["equal", "WRONG: ended after 9 s"]
    assert dict(os.environ) == before
    assert "results" not in Path(rehearsal.__file__).read_text().split('"""', 2)[2]


def test_no_page_calls_a_rehearsal_a_result() -> None:
    text = (ROOT / "docs" / "developing.md").read_text()
    assert "<!-- rehearsed -->" in text
    assert "no GPU" in text.split("<!-- rehearsed -->")[0].rsplit("##", 1)[1]
    assert "rehears" not in (ROOT / "docs" / "results.md").read_text()
