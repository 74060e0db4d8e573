"""What the plan says about the memory of each process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import lightning_pipe
from lightning_pipe.planning.memory import PIECES

MIB = 1 << 20


def plan(ranks: int, accelerator: str, **options: Any) -> lightning_pipe.planning.render.Plan:  # type: ignore[name-defined]
    with torch.device("meta"):
        layers = [nn.Linear(512, 512, bias=False) for _ in range(2 * ranks)]  # a MiB each
        module = nn.Sequential(nn.Embedding(1024, 512), nn.ModuleList(layers))
    options = {"batch": 8, "layers": "1", "balance": [2] * ranks, "accelerator": accelerator, **options}
    return lightning_pipe.plan(module, ranks, **options)


def test_the_share_of_each_process_counts() -> None:
    first, second = plan(2, "gpu").memory[::-1]
    assert (first.process, second.process) == (1, 0)
    # the embedding is on all ranks until the first batch shows who uses it, and its values are made one by one
    assert (first.build, second.build) == ((2 + 2 + 2) * MIB, (2 + 2 + 1) * MIB)
    assert (first.step, second.step) == (4 * 4 * MIB, 4 * 2 * MIB)
    # rank 0 gathers weights and moments, and writes them by way of its memory
    assert (first.saving, second.saving) == (PIECES + 2 * MIB, 2 * 3 * 6 * MIB)


def test_the_host_is_the_device_of_a_cpu() -> None:
    first = plan(2, "cpu").memory[1]
    assert first.saving == first.step + PIECES
    # what it has, what it gathers, and the bytes of the file: 8 + 3 * (6 - 2) + 3 * 6
    text = str(plan(2, "cpu"))
    assert "Memory    rank 0: 5 MiB to build, 8 MiB from the first step on, 38 MiB while saving" in text
    assert "6 MiB to build, 16 MiB on the device from the first step on, 66 MiB while saving" in str(plan(2, "gpu"))


def test_many_ranks_have_one_line() -> None:
    line = "Memory    the most of 16 ranks: 6 MiB to build, 16 MiB on the device from the first step on, 204 MiB"
    assert line in str(plan(16, "gpu"))


def test_what_holders_divide_is_theirs_together() -> None:
    """2 MiB of layers on each of four holders: weights, the gradients of a batch, those kept, two moments."""

    def last(**options: Any) -> float:
        made = plan(2, "gpu", replicas=4, **options)
        assert made.stages[1].bytes == made.memory[0].step, "the only stage of its rank"
        return made.memory[0].step / MIB

    assert last() == 2 + 2 + 4
    assert last(shard_optimizer=True) == last(shard_optimizer="gradients") == 2 + 2 + 4 / 4
    # while a batch runs its gradients are whole, beside what is kept of the batches before
    assert last(accumulation=2) == 2 + 2 + 2 + 4
    assert last(accumulation=2, shard_optimizer=True) == 2 + 2 + 2 + 4 / 4
    assert last(accumulation=2, shard_optimizer="gradients") == 2 + 2 + 2 / 4 + 4 / 4
    made = plan(2, "gpu", replicas=4, shard_optimizer="gradients")
    words = "the holders of a parameter divide its optimizer state and, once they are summed, its gradients"
    assert words in " ".join(str(made).split())
