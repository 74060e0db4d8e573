"""The largest model that trains on one device under a memory limit: naively, and as GPipe trains it (Table 1)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.single_process import SingleProcess
from recipes.errors import RecipeError
from recipes.models import AmoebaNet, GPipeTransformer
from recipes.reproduce.results import Result, Row

MIB = 2**20
NAIVE, GPIPE = "naive", "gpipe"


def table1(models: dict[str, dict[str, Any]], micro_batches: int) -> Result:
    """Sizes and how they grow, beside the published ones.

    Args:
        models: title -> kind, limit in MiB, samples, the other arguments of `peak_bytes`, for both ways the range of
            its size, the published size and parameters, and the tolerance.
        micro_batches: of GPipe's batch.
    """
    rows: list[Row] = []
    for title, model in models.items():
        found = {}
        for way in (NAIVE, GPIPE):
            given = {"kind": model["kind"], "batch": model["batch"], **model["options"]}
            given["micro_batches"] = micro_batches if way == GPIPE else 0
            found[way] = largest(
                cache(lambda size, given=given: measured(size=size, **given)), model["limit"], *model["range"][way]
            )
            size, _, peak = found[way]
            name = model["size"]
            rows.append(
                Row(
                    f"{title}, {way}: largest {name} in {model['limit']} MiB",
                    model["published"][way],
                    size,
                    note=f"peak {peak / MIB:.0f} MiB, in steps of {model['range'][way][2]}; the published {name} is "
                    f"that of the whole limit, {model['scaled']}",
                )
            )
        growth = found[GPIPE][1] / found[NAIVE][1]
        printed = model["parameters"][GPIPE] / model["parameters"][NAIVE]
        rows.append(
            Row(
                f"{title}: parameters that GPipe trains over those that fit naively, one device",
                round(printed, 3),
                growth,
                model["tolerance"],
                note=f"{found[NAIVE][1]:,} and {found[GPIPE][1]:,} parameters; {model['reason']}",
            )
        )
    return Result.of(rows)


def largest(
    peak: Callable[[int], tuple[int, int]], limit: float, first: int, last: int, step: int
) -> tuple[int, int, int]:
    """The largest size whose peak is below the limit, by bisection: with its parameters and its peak.

    Args:
        peak: gives parameters and peak bytes of a size; larger ones need more.
        limit: MiB.
        first: a size that fits.
        last: a size that does not fit.
        step: between sizes.

    Raises:
        RecipeError: the limit is not between those of the first and the last size.
    """
    low, high = first, last
    while high - low > step:
        middle = low + max(1, (high - low) // (2 * step)) * step
        low, high = (middle, high) if peak(middle)[1] <= limit * MIB else (low, middle)
    if peak(low)[1] > limit * MIB or peak(high)[1] <= limit * MIB:
        raise RecipeError(
            f"{limit} MiB are not between a size of {low}, {peak(low)[1] / MIB:.0f} MiB, and one of {high}, "
            f"{peak(high)[1] / MIB:.0f} MiB.",
            hint="Set a wider range.",
        )
    return low, *peak(low)


def measured(**given: Any) -> tuple[int, int]:
    """Parameters of a model, and the peak of its second training step in a process of its own.

    What a fresh process holds with its libraries is not counted.
    """
    # Freed tensors go back to the system at once, so that what is resident is what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "recipes.reproduce.one_device_memory", json.dumps(given)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=3600, check=False)
    if done.returncode:
        raise RuntimeError(f"{words[-1]}: {done.stderr}")
    parameters, peak = json.loads(done.stdout.splitlines()[-1])
    print(f"  {given}: {parameters:,} parameters, {peak / MIB:.0f} MiB", file=sys.stderr, flush=True)
    return parameters, peak


def peak_bytes(kind: str, size: int, batch: int, micro_batches: int, **options: Any) -> tuple[int, int]:
    """Trains two steps in this process.

    Args:
        kind: amoebanet, whose size is its filters, or transformer, whose size is its layers.
        size: of the model.
        batch: samples.
        micro_batches: of the batch, whose forward passes are computed again; 0: the whole batch at once, naively.
        options: of the model and its input.
    """
    made = _amoebanet if kind == "amoebanet" else _transformer
    # What the libraries load and allocate only in a training step is no part of the model's.
    _train(*made(16 if kind == "amoebanet" else 1, 2, **options), 2 if micro_batches else 0)
    before = _resident()
    net, data, loss = made(size, batch, **options)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak (VmHWM) that there was so far
    _train(net, data, loss, micro_batches)
    return sum(parameter.numel() for parameter in net.parameters()), _resident("VmHWM") - before


def _train(net: Any, data: Any, loss: Callable[[Any], Any], micro_batches: int) -> None:
    """With RMSProp: 12 bytes for each parameter, as in the paper."""
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-4, foreach=False)
    pipeline = None
    if micro_batches:
        transport = SingleProcess()
        layers = find_layers(net, "layers")
        pipeline = Pipeline(net, layers, [len(layers)], schedules.get("gpipe"), transport, recompute="always")
    for _ in range(2):
        if pipeline is None:
            loss(data).backward()
        else:
            parts = list(data.tensor_split(micro_batches))
            pipeline.train(lambda _, part: loss(part), parts, [1 / micro_batches] * micro_batches)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def _amoebanet(filters: int, batch: int, image: int, layers: int) -> tuple[Any, Any, Callable[[Any], Any]]:
    net = AmoebaNet("d", layers, filters)
    images = torch.randn(batch, 3, image, image)
    return net, images, lambda part: F.cross_entropy(net(part), torch.zeros(len(part), dtype=torch.long))


def _transformer(layers: int, batch: int, length: int, **options: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
    net = GPipeTransformer(layers, dropout=0.0, **options)
    tokens = torch.randint(options["vocabulary"], (batch, length))
    return net, tokens, lambda part: F.cross_entropy(net(part).flatten(0, 1), part.flatten())


def _resident(name: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    print(json.dumps(peak_bytes(**json.loads(sys.argv[1]))))
