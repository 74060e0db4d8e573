"""The parts themselves, on the CPU in small sizes, and what they decide."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipe import schedules
from tests.benchmarks.measure import Finding
from tests.gpu import delays, largest_model, marked, nccl, shared_device
from tests.gpu.delays import Disturbance, disturbed
from tests.gpu.over_processes import equal
from tests.gpu.rows import compared, is_open
from tests.gpu.runner import PARTS, ROOT
from tests.gpu.setting import Setting
from tests.support.model_zoo import ZOO
from tests.support.pairs import slow_but

SMALL = Setting("cpu", 1, small=True)


def rows(name: str, setting: Setting = SMALL) -> list[Finding]:
    return list(importlib.import_module(f"tests.gpu.{name}").run(setting))


@pytest.mark.parametrize("name", slow_but(["one_rank", "trainer"], "one_rank"))
def test_parts_that_compare_find_equality(name: str) -> None:
    found = rows(name)
    assert len(found) >= 5
    assert [row for row in found if row.reached is not True] == []


def test_delays_change_nothing() -> None:
    assert [row.value for row in rows("delays")] == ["equal"]


@pytest.mark.slow
def test_processes_with_delays_equal_one_device() -> None:
    found = list(equal(SMALL, shared_device.RUNS[:1], "gloo", Disturbance(0)))
    assert [row.value for row in found] == ["equal"]


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["largest_amoebanet", "largest_transformer", "throughput", "host_time", "peak_memory"],
        *("largest_transformer", "throughput"),
    ),
)
def test_parts_that_measure_find_rows(name: str) -> None:
    found = rows(name)
    assert found
    assert [row for row in found if row.reached is False] == []
    assert all(is_open(row) == (name == "peak_memory") for row in found)


def test_every_part_has_a_module() -> None:
    for part in PARTS:
        assert callable(importlib.import_module(f"tests.gpu.{part.name}").run)


@pytest.mark.filterwarnings("ignore:.*has no order of its own")
def test_runs_over_processes_can_be_built() -> None:
    for name, point in [*shared_device.RUNS, *delays.OVER_PROCESSES, *nccl.runs(2), *nccl.runs(3), *nccl.runs(8)]:
        assert name in ZOO
        schedules.get(point.schedule).build(point.pipeline_ranks, point.micro_batches, stages=point.stages)
    assert is_open(rows("nccl")[0])


def test_all_marked_tests_are_run() -> None:
    files = marked.files()
    assert "tests/transport/test_nccl.py" in files
    marks = {
        str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/*.py") if "@pytest.mark.gpu" in path.read_text()
    }
    assert marks <= set(files)
    assert marked.row("tests/a.py::test_b", "PASSED").reached is True
    assert marked.row("tests/a.py::test_b", "ERROR").reached is False
    assert marked.row("tests/a.py::test_b", "SKIPPED").reached is None


def test_an_error_is_a_row_and_others_follow(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(error: BaseException) -> Callable[[], list[str]]:
        def compare() -> list[str]:
            raise error

        return compare

    assert compared("a", fails(RuntimeError("no\nmore"))) == Finding(
        "a", "RuntimeError: no", "1e-9 from one device", False
    )
    assert is_open(compared("a", fails(ImportError("no transformers"))))
    assert compared("a", lambda: ["weight is off"]).reached is False
    assert compared("a", list).value == "equal"


@pytest.mark.parametrize("most", [3, 5, 21, 22, 64, 97, 1000])
def test_the_largest_size_is_found(most: int) -> None:
    asked = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= most

    sizes = range(5, 98, 4)
    expected = max((size for size in sizes if size <= most), default=None)
    assert largest_model.largest(fits, 5, 4, 97) == expected
    assert set(asked) <= set(sizes)
    assert len(asked) <= 12


def test_running_out_of_memory_is_told_from_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    family = largest_model.amoebanet(small=True)

    def fails(error: BaseException) -> Callable[..., None]:
        def train(*_: Any) -> None:
            raise ValueError("around it") from error

        return train

    monkeypatch.setattr(largest_model, "_train", fails(torch.OutOfMemoryError("CUDA out of memory")))
    assert not largest_model.fits(family, "naive", 8, SMALL, 16)
    monkeypatch.setattr(largest_model, "_train", fails(RuntimeError("planted")))
    with pytest.raises(ValueError, match="around it"):
        largest_model.fits(family, "naive", 8, SMALL, 16)


def test_published_models_are_among_the_sizes() -> None:
    for family in (largest_model.amoebanet(small=False), largest_model.transformer(small=False)):
        _, *published = largest_model.PUBLISHED[family.name]
        least, step, most = family.sizes
        printed = {"AmoebaNet-D (18, D)": (208, 416), "Transformer-L": (3, 13)}[family.name]
        for size, parameters in zip(printed, published, strict=True):
            assert size in range(least, most + 1, step)
            assert family.parameters(size) == pytest.approx(parameters, rel=0.01)


def test_delays_and_memory_are_put_back() -> None:
    class Sends:
        process, device = 0, torch.device("cpu")

        def send(self, *_: Any) -> None: ...

        receive = send

    net, transport = nn.Sequential(nn.Linear(2, 2)), Sends()
    with disturbed(net, transport, Disturbance(0)):  # type: ignore[arg-type]
        assert "send" in vars(transport)
        assert net[0]._forward_hooks
        net(torch.zeros(1, 2))
    assert "send" not in vars(transport)
    assert not net[0]._forward_hooks
    assert str(Disturbance(3)) == "delays of seed 3"
