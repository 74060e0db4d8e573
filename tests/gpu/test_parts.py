"""What the parts decide; `tests/gpu/test_rehearsal.py` runs them."""

from __future__ import annotations

import importlib

import pytest
import torch

from lightning_pipe import schedules
from tests.gpu import delays, largest_model, marked, nccl, shared_device
from tests.gpu.rows import is_open
from tests.gpu.runner import PARTS, ROOT
from tests.gpu.setting import Setting
from tests.support.model_zoo import ZOO


def test_every_part_has_a_module() -> None:
    for part in PARTS:
        assert callable(importlib.import_module(f"tests.gpu.{part.name}").run)


@pytest.mark.filterwarnings("ignore:.*has no order of its own")
def test_runs_over_processes_can_be_built() -> None:
    for name, point in [*shared_device.RUNS, *delays.OVER_PROCESSES, *nccl.runs(2), *nccl.runs(3), *nccl.runs(8)]:
        assert name in ZOO
        schedules.get(point.schedule).build(point.pipeline_ranks, point.micro_batches, stages=point.stages)
    assert [is_open(row) for row in nccl.run(Setting(devices=1))] == [True]


def test_all_marked_tests_are_run() -> None:
    files = marked.files()
    assert "tests/transport/test_nccl.py" in files
    marks = {
        str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/*.py") if "@pytest.mark.gpu" in path.read_text()
    }
    assert marks <= set(files)


def test_running_out_of_memory_is_told_from_other_errors() -> None:
    outer = ValueError("around it")
    for error, expected in ((torch.OutOfMemoryError("CUDA out of memory"), True), (RuntimeError("planted"), False)):
        outer.__cause__ = error
        assert largest_model.ran_out(outer) == expected


def test_published_models_are_among_the_sizes() -> None:
    for family in (largest_model.amoebanet(small=False), largest_model.transformer(small=False)):
        _, *published = largest_model.PUBLISHED[family.name]
        least, step, most = family.sizes
        printed = {"AmoebaNet-D (18, D)": (208, 416), "Transformer-L": (3, 13)}[family.name]
        for size, parameters in zip(printed, published, strict=True):
            assert size in range(least, most + 1, step)
            assert family.parameters(size) == pytest.approx(parameters, rel=0.01)
