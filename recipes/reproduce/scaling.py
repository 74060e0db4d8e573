"""How throughput grows with stages and micro-batches: GPipe's and torchgpipe's tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from lightning_pipe.schedules import Action, GPipe, Kind
from lightning_pipe.schedules.dependencies import Number
from lightning_pipe.simulate import Costs, simulate
from recipes.reproduce.published import published
from recipes.reproduce.results import Result, Row, Tolerance


class Checkpointed(Costs):
    """Backward passes take a forward pass more, for the recomputation, but for the micro-batch ``last``."""

    last: int = -1

    def duration(self, action: Action) -> Number:
        """As `Costs`, with the recomputation in the backward pass."""
        own = super().duration(action)
        again = action.kind is Kind.BACKWARD and action.micro_batch != self.last
        return own + super().duration(action._replace(kind=Kind.FORWARD)) if again else own


def time_per_batch(stages: Sequence[float], micro_batches: int, keep_last: bool = False) -> float:
    """Of GPipe with recomputation and without messages, in the unit of the stages' times.

    Args:
        stages: forward pass of the whole batch on each stage; a backward pass takes two of them.
        micro_batches: M.
        keep_last: the last micro-batch is not recomputed.
    """
    forward = [time / micro_batches for time in stages]
    costs = Checkpointed(forward=forward, backward=[2 * time for time in forward])
    object.__setattr__(costs, "last", micro_batches - 1 if keep_last else -1)
    return float(simulate(GPipe().build(len(stages), micro_batches), costs).makespan)


def gpipe_table2(tolerance: str) -> Result:
    """Transformer-48 on TPUs, with equal stages.

    Args:
        tolerance: of all values, and of the growth from K=2 at M=32.
    """
    rows = []
    printed = published("gpipe", "Table 2")
    base = time_per_batch([0.5, 0.5], 1)
    for micro_batches, speeds in printed["Transformer-48"].items():
        for ranks, speed in zip((2, 4, 8), speeds, strict=True):
            found = base / time_per_batch([1 / ranks] * ranks, int(micro_batches))
            exceeds = "exceeds the bound of the bubble: the paper changes the batch size with M and K"
            note = exceeds if speed > found else "messages take no time in the simulator"
            what = f"Transformer-48, K={ranks}, M={micro_batches}, over K=2, M=1"
            rows.append(Row(what, speed, found, Tolerance(tolerance), note=note))
    own = [time_per_batch([1 / ranks] * ranks, 32) for ranks in (2, 4, 8)]
    two, *others = printed["Transformer-48"]["32"]
    for ranks, time, speed in zip((4, 8), own[1:], others, strict=True):
        what = f"Transformer-48, M=32, K={ranks} over K=2"
        rows.append(Row(what, speed / two, own[0] / time, Tolerance(tolerance)))
    return Result.of(rows)


def gpipe_table3(tolerance: str) -> Result:
    """Transformer-24 on P100s without NVLink, M=32."""
    rows = []
    own = [time_per_batch([1 / ranks] * ranks, 32) for ranks in (2, 4, 8)]
    for ranks, time, speed in zip((2, 4, 8), own, published("gpipe", "Table 3")["Transformer-24"], strict=True):
        rows.append(Row(f"Transformer-24, K={ranks} over K=2", speed, own[0] / time, Tolerance(tolerance)))
    return Result.of(rows)


def amoebanet_table2(tolerance: str) -> Result:
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
        rows.append(Row(f"K={ranks}, M=32, over K=2, M=1", speed, found, Tolerance(tolerance), note=reason))
    return Result.of(rows)


def torchgpipe_amoebanet(tolerance: str) -> Result:
    """AmoebaNet-D(18,256) on P40s from counted operations."""
    flops, rows = operations(18, 256), []
    base = time_per_batch(cut(flops, [9, 15]), 1)
    for ranks, micro_batches, _, speed, balance, checkpoint in published("torchgpipe", "AmoebaNet-D speed"):
        found = base / time_per_batch(cut(flops, balance), micro_batches, keep_last=checkpoint == "except_last")
        what = f"n={ranks}, m={micro_batches}, over n=2, m=1"
        note = f"balance {balance}; operations are counted, not how fast kernels of each size run"
        rows.append(Row(what, speed, found, Tolerance(tolerance), note=note))
    return Result.of(rows)


def cut(times: Sequence[float], balance: Sequence[int]) -> list[float]:
    """The sums of so many consecutive layers."""
    left = iter(times)
    return [sum(next(left) for _ in range(number)) for number in balance]


@cache
def operations(layers: int, filters: int, image: int = 224) -> tuple[float, ...]:
    """Giga-operations of convolutions and linear layers of each layer of AmoebaNet-D, forward, for one image."""
    from recipes.models.amoebanet import amoebanet_d

    counted = 0.0

    def count(module: nn.Module, _: object, output: Tensor) -> None:
        nonlocal counted
        weight = module.weight
        assert isinstance(weight, Tensor)
        counted += 2 * output.numel() * weight[0].numel() / 1e9

    sums = []
    with torch.device("meta"), torch.no_grad():
        model, value = amoebanet_d(layers, filters), torch.empty(1, 3, image, image)
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.register_forward_hook(count)
        for layer in model.layers:
            before = counted
            value = layer(value)
            sums.append(counted - before)
    return tuple(sums)
