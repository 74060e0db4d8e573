"""What a training step over a whole batch returns, made of what it returned for micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.batches.joining import join
from lightning_pipe.batches.micro_batches import MicroBatches
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.engine.stage import loss_of
from lightning_pipe.engine.withheld_gradients import WithheldGradients


def losses_on_host(outputs: dict[int, Any], pipeline: Pipeline) -> dict[int, Any]:
    """What the step returned, with the losses where they can be sent from: one transfer brings all of them there.

    In a pipeline of one rank nobody else gets them, and the host waits for none.
    """
    if len(pipeline.pipeline_members) == 1:
        return outputs
    losses = [*map(loss_of, outputs.values())]
    host = [torch.tensor(value, dtype=loss.dtype) for value, loss in zip(to_host(losses), losses, strict=True)]
    return {
        index: loss if isinstance(output, Tensor) else {**output, "loss": loss}
        for (index, output), loss in zip(outputs.items(), host, strict=True)
    }


def of_batch(
    outputs: Mapping[int, Any],
    micro_batches: MicroBatches,
    withheld: WithheldGradients,
    device: torch.device,
) -> Any:
    """What the step returns for a batch: the loss, whose backward pass returns the gradients, or a dictionary with it.

    Args:
        outputs: what the step returned for each micro-batch.
        micro_batches: the batch.
        withheld: the gradients that are due now.
        device: where the loss belongs.
    """
    values = [outputs[index] for index in sorted(outputs)]
    losses = [*map(loss_of, values)]
    # what is on an accelerator stays there: to look at it, the host would wait for the batch
    host = all(one.is_cpu for one in losses)
    loss = micro_batches.loss([float(one) if host else one.detach().to(torch.float64) for one in losses])
    loss = withheld.loss(loss, losses[0].dtype, device)
    if not isinstance(values[0], Mapping):
        return loss
    # everything but the loss, which alone leads to the gradients
    others = {i: {k: v for k, v in value.items() if k != "loss"} for i, value in enumerate(values)}
    return {**join(others, micro_batches.sizes, micro_batches.shares), "loss": loss}


def to_host(values: Sequence[Tensor | None]) -> list[float]:
    """The values as numbers, with one transfer from each accelerator."""
    numbers = [0.0] * len(values)
    groups: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        if value is not None and value.is_cpu:
            numbers[index] = float(value.item())
        elif value is not None:
            groups.setdefault(value.device, []).append(index)
    for indices in groups.values():
        stacked = torch.stack([values[i].reshape(()).to(torch.float64) for i in indices])  # type: ignore[union-attr]
        for index, number in zip(indices, stacked.tolist(), strict=True):
            numbers[index] = number
    return numbers
