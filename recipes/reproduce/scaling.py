"""How throughput grows with stages and micro-batches: GPipe's and torchgpipe's tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from lightning_pipe.partition import balance as best_cut
from lightning_pipe.partition import layer_flops
from lightning_pipe.schedules import GPipe, with_recompute
from lightning_pipe.schedules.passes.recompute import insert_recompute
from lightning_pipe.simulate import Costs, simulate
from recipes.models import AmoebaNet, UNet, resnet101
from recipes.reproduce.published import published
from recipes.reproduce.results import Result, Row, near, shares


def time_per_batch(stages: Sequence[float], micro_batches: int, keep_last: bool = False) -> float:
    """Of GPipe without messages, in the unit of the stages' times.

    Activations are computed again before their gradient is there, as GPipe (section 2.3) and torchgpipe do.

    Args:
        stages: forward pass of the whole batch on each stage; a backward pass takes two of them.
        micro_batches: M.
        keep_last: the last micro-batch is not recomputed.
    """
    forward = [time / micro_batches for time in stages]
    built = GPipe().build(len(stages), micro_batches)
    if keep_last:
        built = with_recompute(built, "except_last")
    else:
        built = replace(built, actions=tuple(tuple(insert_recompute(order)) for order in built.actions))
    return float(simulate(built, Costs(forward, [2 * time for time in forward])).makespan)


def gpipe_table2() -> Result:
    """Transformer-48 on TPUs, with equal stages."""
    rows = []
    printed = published("gpipe", "Table 2")
    base = time_per_batch([0.5, 0.5], 1)
    for micro_batches, speeds in printed["Transformer-48"].items():
        for ranks, speed in zip((2, 4, 8), speeds, strict=True):
            found = base / time_per_batch([1 / ranks] * ranks, int(micro_batches))
            exceeds = "exceeds the bound of the bubble: the paper changes the batch size with M and K"
            note = exceeds if speed > found else "messages take no time in the simulator"
            what = f"Transformer-48, K={ranks}, M={micro_batches}, over K=2, M=1"
            rows.append(_over(what, speed, found, note))
    own = [time_per_batch([1 / ranks] * ranks, 32) for ranks in (2, 4, 8)]
    two, *others = printed["Transformer-48"]["32"]
    for ranks, time, speed in zip((4, 8), own[1:], others, strict=True):
        what = f"Transformer-48, M=32, K={ranks} over K=2"
        rows.append(near(what, speed / two, own[0] / time))
    return Result.of([shares(rows), *rows])


def gpipe_table3() -> Result:
    """Transformer-24 on P100s without NVLink, M=32."""
    rows = []
    own = [time_per_batch([1 / ranks] * ranks, 32) for ranks in (2, 4, 8)]
    for ranks, time, speed in zip((2, 4, 8), own, published("gpipe", "Table 3")["Transformer-24"], strict=True):
        rows.append(_over(f"Transformer-24, K={ranks} over K=2", speed, own[0] / time))
    return Result.of(rows)


def amoebanet_table2() -> Result:
    """AmoebaNet-D(18,256) on TPUs by its operations: what does not come out."""
    flops, rows = operations(18, 256), []
    base = time_per_batch(cut(flops, [12, 12]), 1)
    for ranks, balance, speed in zip(
        (2, 4, 8),
        ([12, 12], [7, 5, 5, 7], [5, 3, 2, 3, 3, 2, 3, 3]),
        published("gpipe", "Table 2")["AmoebaNet-D(18,256)"]["32"],
        strict=True,
    ):
        found = base / time_per_batch(cut(flops, balance), 32)
        reason = (
            "the speeds of the authors' TPUs grow less than operations and bubbles say; communication is not described"
        )
        rows.append(near(f"K={ranks}, M=32, over K=2, M=1", speed, found, note=reason))
    return Result.of(rows)


def torchgpipe_amoebanet() -> Result:
    """AmoebaNet-D(18,256) on P40s from counted operations."""
    flops, rows = operations(18, 256), []
    base = time_per_batch(cut(flops, [7, 17]), 1)
    for ranks, micro_batches, _, speed, balance, checkpoint in published("torchgpipe", "AmoebaNet-D speed"):
        found = base / time_per_batch(cut(flops, balance), micro_batches, keep_last=checkpoint == "except_last")
        what = f"n={ranks}, m={micro_batches}, over n=2, m=1"
        note = f"balance {balance}; operations are counted, not how fast kernels of each size run"
        rows.append(_over(what, speed, found, note))
    return Result.of(rows)


def torchgpipe_speed(model: str, image: int, counted: str) -> Result:
    """ResNet-101 or U-Net on P40s from counted operations, cut as they say, over one device without a pipeline.

    Args:
        model: ResNet-101 or U-Net.
        image: side of the images.
        counted: tolerance of the pipeline on one device, whose speed is counted.
    """
    net = resnet101() if model == "ResNet-101" else UNet(5, 64)
    layers = list(net) if isinstance(net, nn.Sequential) else list(net.layers)
    flops, rows = operations_of(net, layers, image), []
    whole = 3 * sum(flops)
    note = "operations are counted: normalization and activations, which move memory and compute little, weigh nothing"
    for devices, _, speed, _, micro_batches, _ in published("torchgpipe", f"{model} speed")["pipelines"]:
        stages = cut(flops, best_cut(flops, devices))
        found = whole / time_per_batch(stages, micro_batches, keep_last=True)
        what = f"{devices} device{'s' if devices > 1 else ''}, {micro_batches} micro-batches, over the baseline"
        one = Row(what, speed, found, counted, note=note)
        rows.append(one if devices == 1 else near(what, speed, found, note=note))
    return Result.of(rows)


def amoebanet_table3() -> Result:
    """AmoebaNet-D(18,128) on P100s without NVLink, M=32, by its operations and the best cut."""
    flops, rows = operations(18, 128), []
    times = [time_per_batch(cut(flops, best_cut(flops, ranks)), 32) for ranks in (2, 4, 8)]
    printed = published("gpipe", "Table 3")["AmoebaNet-D(18,128)"]
    for ranks, time, speed in zip((2, 4, 8), times, printed, strict=True):
        note = "operations are counted, and messages are free; over PCIe they are not"
        rows.append(_over(f"K={ranks}, M=32, over K=2", speed, times[0] / time, note))
    return Result.of(rows)


def _over(what: str, speed: float, found: float, note: str = "") -> Row:
    """A speed over that of another set-up; of that set-up itself it is 1 by definition, which shows nothing."""
    if speed == found == 1:
        return Row(what, speed, found, note="the unit of the other values")
    return near(what, speed, found, note=note)


def cut(times: Sequence[float], balance: Sequence[int]) -> list[float]:
    """The sums of so many consecutive layers."""
    left = iter(times)
    return [sum(next(left) for _ in range(number)) for number in balance]


@cache
def operations(layers: int, filters: int) -> tuple[float, ...]:
    """Of each layer of AmoebaNet-D, see `operations_of`."""
    with torch.device("meta"):
        model = AmoebaNet("d", layers, filters)
    return operations_of(model, list(model.layers), image=224)


def operations_of(net: nn.Module, layers: Sequence[nn.Module], image: int) -> tuple[float, ...]:
    """Giga-operations of convolutions and linear layers of each layer, forward, for one image.

    Args:
        net: the network.
        layers: its layers in order.
        image: side of the image.
    """
    net.example_input_array = torch.empty(1, 3, image, image, device="meta")
    counted = layer_flops(net.eval(), [(str(number), layer) for number, layer in enumerate(layers)])
    return tuple(each / 1e9 for each in counted)
