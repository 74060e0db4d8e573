"""What the plan says about the memory of each process."""

from __future__ import annotations

import torch
from torch import nn

import lightning_pipe
from lightning_pipe.planning.memory import PIECES

MIB = 1 << 20


def plan(ranks: int, accelerator: str) -> lightning_pipe.planning.render.Plan:  # type: ignore[name-defined]
    with torch.device("meta"):
        layers = [nn.Linear(512, 512, bias=False) for _ in range(2 * ranks)]  # a MiB each
        module = nn.Sequential(nn.Embedding(1024, 512), nn.ModuleList(layers))
    return lightning_pipe.plan(module, ranks, batch=8, layers="1", balance=[2] * ranks, accelerator=accelerator)  # type: ignore[arg-type]


def test_the_share_of_each_process_counts() -> None:
    first, second = plan(2, "gpu").memory[::-1]
    assert (first.process, second.process) == (1, 0)
    # the embedding is on all ranks until the first batch shows who uses it, and its values are made one by one
    assert (first.build, second.build) == ((2 + 2 + 2) * MIB, (2 + 2 + 1) * MIB)
    assert (first.step, second.step) == (4 * 4 * MIB, 4 * 2 * MIB)
    assert (first.saving, second.saving) == (PIECES + 2 * MIB, PIECES + MIB)


def test_the_host_is_the_device_of_a_cpu() -> None:
    first = plan(2, "cpu").memory[1]
    assert first.saving == first.step + PIECES
    text = str(plan(2, "cpu"))
    assert "Host      rank 0: 5 MiB to build, 8 MiB from the first step on, 72 MiB while saving" in text
    assert "Device" not in text
    assert "Device    rank 0: 8 MiB from the first step on" in str(plan(2, "gpu"))


def test_many_ranks_have_one_line() -> None:
    assert "Host      the most of 16 ranks: 6 MiB to build, 66 MiB while saving" in str(plan(16, "gpu"))
