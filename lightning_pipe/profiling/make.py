"""`lightning_pipe.profile`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pipe.planning.cost_profile import CostProfile
from lightning_pipe.profiling.layers import Step
from lightning_pipe.profiling.measure import measure_profile
from lightning_pipe.profiling.processes import in_processes
from lightning_pipe.transport.single_process import SingleProcess


def profile(
    module: nn.Module,
    batch: Any,
    ranks: int = 1,
    *,
    micro_batch_sizes: Sequence[int] | None = None,
    layers: str | Sequence[str] | None = None,
    step: Step | None = None,
    rounds: int = 5,
    device: str = "cpu",
    timeout: float = 1800,
) -> CostProfile:
    """Measure what a module costs on this machine, with as many processes at work as the coming run has.

    Args:
        module: mostly a LightningModule; it is measured as a copy.
        batch: real input, from which micro-batches are cut along dimension 0; of a loader the first batch.
        ranks: processes that measure at the same time, and send each other messages; one alone measures no messages.
        micro_batch_sizes: samples of the micro-batches to measure; by default 1, 2, 4 and 8 as far as the batch goes.
        layers: dotted names of the layer sequence.
        step: ``step(module, micro_batch)`` returns the loss; by default ``training_step``, or the sum of the first
            tensor that the module returns.
        rounds: repetitions, of which the median counts.
        device: ``"cpu"``, or ``"cuda"`` with a GPU for each rank.
        timeout: seconds for all of it.

    Returns:
        The profile; `CostProfile.save` writes it.

    Raises:
        PipeError: the module has no layers that can be cut, or a process failed.

    Example:
        >>> net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        >>> sorted(profile(net, torch.ones(4, 8), micro_batch_sizes=[1, 4], rounds=1).sizes)
        [1, 4]
    """
    options: dict[str, Any] = {"micro_batch_sizes": micro_batch_sizes, "layers": layers, "step": step, "rounds": rounds}
    if ranks == 1:
        return measure_profile(SingleProcess(torch.device(device)), module, batch, **options)
    job = partial(measure_profile, module=module, batch=batch, **options)
    return in_processes(job, ranks, device, timeout)  # type: ignore[no-any-return]
