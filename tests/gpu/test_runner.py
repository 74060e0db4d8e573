"""The runner of the parts: order, limits, results that are written at once, and nothing without CUDA."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import __main__ as command
from tests.gpu import runner
from tests.gpu.runner import FIRST_SECONDS, PARTS, Part, chosen, run_parts, table

# modules of this folder that stand in for parts
QUICK = Part("standins.quick", "finds one row", 60)
SLOW = Part("standins.slow", "finds one row and goes on for ever", 2)


def test_the_first_parts_are_done_in_nine_minutes() -> None:
    first = [part for part in PARTS if part.first]
    assert first == list(PARTS[: len(first)])
    # a part that is overdue is ended within two waits
    assert sum(part.limit + 2 for part in first) <= FIRST_SECONDS


def test_parts_run_by_priority_whatever_their_order() -> None:
    assert chosen([]) == list(PARTS)
    assert [part.name for part in chosen(["throughput", "one_rank"])] == ["one_rank", "throughput"]
    with pytest.raises(ValueError, match="no part other; there are marked, one_rank"):
        chosen(["other"])


def test_results_are_written_as_parts_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = (QUICK, SLOW)
    monkeypatch.setattr(runner, "PARTS", parts)
    results = tmp_path / "results" / "gpu.json"
    assert not run_parts(parts, results, {"torch": "2"}, devices=1, small=True)
    found = json.loads(results.read_text())
    assert [part["status"] for part in found.values()] == ["done", "ended after 2 s"]
    for part in found.values():
        assert part["rows"][0]["name"] == "a row"
        assert part["conditions"] == {"torch": "2"}
    assert table(results).count("a row") == 2
    assert "a row" in capfd.readouterr().out
    # a later run of one part leaves the others
    assert run_parts([QUICK], results, {"torch": "3"}, devices=1, small=True)
    again = json.loads(results.read_text())
    assert list(again) == list(found)
    assert again[QUICK.name]["conditions"] == {"torch": "3"}
    assert again[SLOW.name] == found[SLOW.name]


def test_an_interrupt_keeps_what_has_been_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PARTS", (SLOW, QUICK))
    waiting = subprocess.Popen.wait

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout == SLOW.limit:
            with contextlib.suppress(subprocess.TimeoutExpired):
                waiting(process, timeout / 2)
            raise KeyboardInterrupt
        return waiting(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    results = tmp_path / "gpu.json"
    assert not run_parts([SLOW, QUICK], results, {}, devices=1, small=True)
    (found,) = json.loads(results.read_text()).values()
    assert (found["status"], found["rows"][0]["name"]) == ("interrupted", "a row")


def test_without_cuda_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*_: Any, **__: Any) -> bool:
        raise AssertionError("a part was run")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "run_parts", refused)
    assert command.main([]) == 1
    assert capsys.readouterr().out == f"NOT RUN: torch {torch.__version__} sees no CUDA device\n"
    monkeypatch.setattr(command, "NEEDED", ("torch", "no_such_package"))
    assert command.main(["first"]) == 1
    assert "has no no_such_package" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["other"])
