"""What recomputation costs: torchgpipe's one-device pipelines and GPipe's breakdown, as formula and timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.single_process import SingleProcess
from recipes.models.resnet import resnet101
from recipes.models.unet import UNet
from recipes.reproduce.published import published
from recipes.reproduce.results import Result, Row

FORMULA = 3 / 3.5
"""Forward pass 1, backward pass 2, for half of the samples the forward pass again: 3 of 3.5 units of work."""


def cost(formula: str, timed: str, rounds: int) -> Result:
    """Both of torchgpipe's pipelines on one device: two micro-batches, of which the first is recomputed.

    Args:
        formula: tolerance of what counting says.
        timed: tolerance of what is measured.
        rounds: pairs of batches, with and without; the median of their ratios counts.
    """
    rows = []
    for model, net, sample in (
        ("ResNet-101", lambda: resnet101(10, blocks=(1, 1, 2, 1)), (8, 3, 112, 112)),
        ("U-Net", lambda: UNet(2, 16), (8, 3, 64, 64)),
    ):
        printed = published("torchgpipe", f"{model} speed")["pipelines"][0][2]
        what = f"{model}: speed of pipeline-1 over the baseline"
        rows.append(Row(f"{what}, counted", printed, FORMULA, formula, note="3 / 3.5 units of work"))
        found = measured(net, sample, rounds)
        note = f"median of {rounds} pairs on one thread, a smaller {model}; a busy machine disturbs it"
        rows.append(Row(f"{what}, timed", printed, found, timed, note=note))
    return Result.of(rows)


def breakdown(tolerance: str) -> Result:
    """GPipe's step time by its parts: what counting says of the repeated forward passes; the rest is the machine's.

    Args:
        tolerance: of the ratio.
    """
    printed = published("gpipe", "NeurIPS Table 4")
    rows = [
        Row(
            "recomputation over computation",
            round(printed["recompute"] / printed["computation"], 3),
            1 / 3,
            tolerance,
            note="one forward pass more for a forward pass and a backward pass of two",
        )
    ]
    reason = "a share of the time of the authors' TPUs; the numbers of stages' layers and micro-batches are not printed"
    rows += [
        Row(f"share of {part}", share, None, unit="%", note=reason)
        for part, share in printed.items()
        if part not in ("computation", "recompute")
    ]
    return Result.of(rows)


def measured(make: Callable[[], nn.Module], sample: tuple[int, ...], rounds: int) -> float:
    """Speed with ``except_last`` over that without recomputation, both with two micro-batches, one after the other.

    Args:
        make: makes the network.
        sample: shape of a batch.
        rounds: pairs.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        images = torch.randn(*sample)
        runs = [_pipeline(make(), images, mode) for mode in ("never", "except_last")]
        for run in runs:
            run()
        ratios = []
        for number in range(rounds):
            order = runs if number % 2 == 0 else runs[::-1]
            seconds = {id(run): run() for run in order}
            ratios.append(seconds[id(runs[0])] / seconds[id(runs[1])])
        return statistics.median(ratios)
    finally:
        torch.set_num_threads(threads)


def _pipeline(net: nn.Module, images: Tensor, recompute: Any) -> Callable[[], float]:
    transport = SingleProcess()
    layers = find_layers(net)
    pipeline = Pipeline(net, layers, [len(layers)], schedules.get("gpipe"), transport, recompute=recompute)
    parts = list(images.tensor_split(2))

    def once() -> float:
        net.zero_grad()
        start = time.perf_counter()
        pipeline.train(lambda _, part: F.relu(net(part)).mean(), parts, [0.5, 0.5])
        return time.perf_counter() - start

    return once
