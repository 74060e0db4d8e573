"""Measures what a module costs with the processes and devices of a coming run; see `lightning_pipe.profile`."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipe.batches.split_batch import samples, split
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.partition import find_layers
from lightning_pipe.patches import unheard
from lightning_pipe.planning.cost_profile import SHAPES, CostProfile, merged
from lightning_pipe.planning.layer_sizes import without_times
from lightning_pipe.profiling.layers import Step, measure_layers, settled
from lightning_pipe.profiling.machine import measure_machine
from lightning_pipe.torch_internals import tree_leaves, tree_map
from lightning_pipe.transport.base import Transport
from lightning_pipe.version import __version__

SIZES = (1, 2, 4, 8)
_STEP_NUMBERS = 1 << 18
_LOGGED = "You are trying to `self.log\\(\\)` but the `self.trainer` reference is not registered.*"
"""Lightning 2.6: nothing is logged where a step is measured."""


def measure_profile(
    transport: Transport,
    module: nn.Module,
    batch: Any,
    *,
    micro_batch_sizes: Sequence[int] | None = None,
    layers: str | Sequence[str] | None = None,
    step: Step | None = None,
    rounds: int = 5,
) -> CostProfile:
    """Measure with the processes of a transport, all at the same time. Collective over its world.

    See `lightning_pipe.profile`, which starts the processes.
    """
    if rounds < 1:
        raise ConfigurationError(f"At least one repetition is measured, not rounds={rounds}.")
    place = transport.device
    batch = next(iter(batch)) if isinstance(batch, DataLoader) else batch
    batch = tree_map(lambda leaf: leaf.to(place) if isinstance(leaf, Tensor) else leaf, batch)
    sizes = _sizes(batch, micro_batch_sizes)
    everyone = transport.topology.everyone
    found, overheads = {}, []
    for size in sizes:
        transport.barrier()
        with unheard(_LOGGED):
            part = first(batch, size)
            found[size], overhead = measure_layers(module, layers, step or default_step, part, place, rounds)
        overheads.append(overhead)
    own = replace(
        without_times(module, find_layers(module, layers)),
        sizes=found,
        overhead=min(overheads),
        step_per_byte=_step_per_byte(place),
        conditions={
            **run_conditions(place, _precision(module)),
            "ranks": str(transport.topology.world_size),
            "transport": type(transport).__name__,
            SHAPES: shapes_of_a_sample(batch),
        },
    )
    together = merged(transport.all_gather_object(own, everyone))
    return replace(together, **measure_machine(transport, 4 * rounds, together.overhead))


def run_conditions(device: torch.device, precision: str = "32-true") -> dict[str, str]:
    """What figures measured in this process depend on besides the module and its input.

    Args:
        device: that computes.
        precision: as Lightning names it.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": f"{device.type} ({name})",
        "precision": precision,
        "threads": str(torch.get_num_threads()),
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
        "lightning_pipe": __version__,
    }


def _precision(module: nn.Module) -> str:
    """That of a step without a Trainer, by the module's parameters."""
    own = next((parameter.dtype for parameter in module.parameters()), torch.float32)
    return {torch.float64: "64-true", torch.float16: "16-true", torch.bfloat16: "bf16-true"}.get(own, "32-true")


def default_step(module: nn.Module, part: Any) -> Any:
    """The ``training_step`` of a LightningModule; of another module the sum of its first result."""
    step: Any = getattr(module, "training_step", None)
    if step is not None:
        return step(part, 0)
    result = module(**part) if isinstance(part, dict) else module(*part) if isinstance(part, tuple) else module(part)
    loss = getattr(result, "loss", None)
    return loss if loss is not None else next(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)).sum()


def first(batch: Any, number: int) -> Any:
    """The first samples of a batch, cut as in a run; they do not share the memory of the others."""
    rest = samples(batch) - number
    part = split(batch, [number, rest])[0] if rest else batch
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, part)


def shapes_of_a_sample(batch: Any) -> str:
    """The shapes and types of the tensors of one sample, in words.

    Example:
        >>> shapes_of_a_sample({"ids": torch.zeros(4, 7, dtype=torch.long), "label": torch.zeros(4)})
        '(1, 7) int64, (1) float32'
    """
    tensors = [leaf for leaf in tree_leaves(first(batch, 1)) if isinstance(leaf, Tensor)]
    named = (f"({', '.join(map(str, tensor.shape))}) {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors)
    return ", ".join(named)


def _sizes(batch: Any, wanted: Sequence[int] | None) -> list[int]:
    number = samples(batch)
    if wanted is None:
        return [size for size in SIZES if size <= number] or [number]
    sizes = sorted(set(wanted))
    if not sizes or sizes[0] < 1 or sizes[-1] > number:
        raise ConfigurationError(
            f"micro_batch_sizes={list(wanted)} cannot be measured with a batch of {number} samples.",
            hint=f"Use sizes from 1 to {number}, or give a larger batch.",
        )
    return sizes


def _step_per_byte(device: torch.device) -> float:
    """Seconds that Adam takes for each byte of parameters."""
    weight = nn.Parameter(torch.zeros(_STEP_NUMBERS, device=device))
    weight.grad = torch.ones_like(weight)
    optimizer: torch.optim.Optimizer = torch.optim.Adam([weight])
    samples = []
    for _ in range(5):
        start = settled()
        optimizer.step()
        samples.append(settled() - start)
    return median(samples[1:]) / weight.nbytes
