"""GPipe's claim for one accelerator: micro-batches and recomputation let larger models train (GPipe, Table 1).

Its columns Naive-1 and Pipe-1: AmoebaNet-D (18, D) on images of 224 pixels in batches of 128 with 8 GB, and
Transformer-L on 32 sequences of 1024 tokens with 16 GB. Both limits are set here for both models, as a share of the
device's memory. RMSProp keeps 12 bytes for each parameter, weights and gradients among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import divide, find_layers
from lightning_pipe.transport.single_process import SingleProcess
from recipes.models.amoebanet import AmoebaNet
from recipes.models.gpipe_transformer import GPipeTransformer
from tests.benchmarks.measure import Finding
from tests.gpu.rows import PLACE, clear
from tests.gpu.setting import Setting

GB = 10**9
LIMITS = (8, 16)
PUBLISHED = {"AmoebaNet-D (18, D)": (8, 82e6, 318e6), "Transformer-L": (16, 282.2e6, 785.8e6)}
"""Memory in GB, and parameters of the largest models, without and with micro-batches and recomputation (Table 1)."""
STAGES = 4


@dataclass(frozen=True)
class Family:
    """Models that grow with one number.

    Args:
        name: a key of `PUBLISHED`.
        build: makes one on the current default device.
        batch: makes a batch of a number of samples.
        samples: in the batch that trains.
        micro_batches: of the runs with them.
        sizes: smallest number, step and largest.
    """

    name: str
    build: Callable[[int], nn.Module]
    batch: Callable[[int, torch.device], tuple[Tensor, Tensor]]
    samples: int
    micro_batches: int
    sizes: tuple[int, int, int]

    def parameters(self, size: int) -> int:
        """How many a model has, without making it."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build(size).parameters())


def amoebanet(small: bool) -> Family:
    """AmoebaNet-D (18, D), whose number is that of its filters."""

    def images(samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
        pixels = 32 if small else 224
        return torch.randn(samples, 3, pixels, pixels, device=device), torch.randint(10, (samples,), device=device)

    name = "AmoebaNet-D (18, D)"
    if small:
        return Family(name, lambda filters: AmoebaNet("d", 3, filters, 10), images, 4, 2, (16, 16, 16))
    return Family(name, lambda filters: AmoebaNet("d", 18, filters), images, 128, 32, (64, 16, 1024))


def transformer(small: bool) -> Family:
    """Transformer-L, whose number is that of its layers."""

    def tokens(samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
        ids = torch.randint(32 if small else 32_000, (samples, 9 if small else 1025), device=device)
        return ids[:, :-1], ids[:, 1:]

    def tiny(layers: int) -> nn.Module:
        return GPipeTransformer(layers, vocabulary=32, width=16, inner=32, heads=2)

    if small:
        return Family("Transformer-L", tiny, tokens, 4, 2, (1, 1, 2))
    return Family("Transformer-L", GPipeTransformer, tokens, 32, 32, (1, 1, 128))


def rows(family: Family, setting: Setting) -> Iterator[Finding]:
    """For each limit, the published one first, the largest model that trains in both ways."""
    limit, *published = PUBLISHED[family.name]
    for gigabytes in [limit] if setting.small else sorted(LIMITS, key=limit.__ne__):
        found: list[int] = []
        for column, way in enumerate(("naive", "micro-batches, recomputation")):
            size = largest(partial(fits, family, way, gigabytes), *family.sizes)
            found.append(0 if size is None else family.parameters(size))
            target = f"{published[column] / 1e6:.0f} M published" if gigabytes == limit else ""
            value = "none" if size is None else f"{size}: {found[-1] / 1e6:.1f} M parameters"
            yield Finding(f"{family.name}, {gigabytes} GB, {way}", value, target)
        naive, piped = found
        target = f"{published[1] / published[0]:.1f} published" if gigabytes == limit else ""
        gain = f"{piped / naive:.1f}" if naive else "none trains without"
        yield Finding(f"{family.name}, {gigabytes} GB, gain", gain, target, None if setting.small else piped > naive)


def largest(fits: Callable[[int], bool], least: int, step: int, most: int) -> int | None:
    """The largest of ``least, least + step, … most`` that fits, if all smaller ones do; ``None``: not even the first.

    Example:
        >>> largest(lambda size: size <= 37, 1, 4, 100), largest(lambda size: False, 1, 4, 100)
        (37, None)
    """
    if not fits(least):
        return None
    good, width = 0, 1
    while good + width <= (most - least) // step and fits(least + (good + width) * step):
        good, width = good + width, 2 * width
    while width > 1:
        width //= 2
        if good + width <= (most - least) // step and fits(least + (good + width) * step):
            good += width
    return least + good * step


def fits(family: Family, way: str, gigabytes: int, size: int) -> bool:
    """Whether two steps of a model stay within a limit of memory."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * GB / total), 0)
    enough = True
    try:
        _train(family, size, way)
    except Exception as error:
        enough = False
        if not ran_out(error):
            raise
    # behind the handler, whose error holds the tensors
    clear()
    return enough


def ran_out(error: BaseException | None) -> bool:
    """Whether an error, or what led to it, is one of memory."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _train(family: Family, size: int, way: str) -> None:
    torch.manual_seed(0)
    with PLACE:
        module = family.build(size)
    optimizer = torch.optim.RMSprop(module.parameters(), lr=1e-4)
    inputs, targets = family.batch(family.samples, PLACE)

    def loss_of(part: Any) -> Tensor:
        predicted = module(part[0])
        return F.cross_entropy(predicted.flatten(0, -2), part[1].flatten())

    pipeline = None if way == "naive" else _pipeline(module)
    for _ in range(2):  # from the second on the optimizer has its state
        optimizer.zero_grad()
        if pipeline is None:
            loss_of((inputs, targets)).backward()
        else:
            count = family.micro_batches
            parts = list(zip(inputs.chunk(count), targets.chunk(count), strict=True))
            pipeline.train(lambda _, part: loss_of(part), parts, [1 / len(parts)] * len(parts))
        optimizer.step()
    torch.cuda.synchronize()


def _pipeline(module: nn.Module) -> Pipeline:
    """Several stages on one device: what is kept of a micro-batch is the input of each."""
    device = next(module.parameters()).device
    transport = SingleProcess(device)
    layers = find_layers(module, "layers")
    stages = min(STAGES, len(layers))
    balance = divide(module, layers, stages)
    pipeline = Pipeline(module, layers, balance, schedules.get("gpipe"), transport, recompute="always")
    pipeline.partition()
    return pipeline
