"""What is counted: parameters of the published models, their stages, and the memory that follows from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from lightning_pipe.partition import find_layers, places_by_stage
from recipes.models import AmoebaNet, GPipeTransformer, UNet, bert48, gpt2_chimera
from recipes.reproduce.published import published
from recipes.reproduce.results import Result, Row

GIB = 2**30
RMSPROP = 12
"""Bytes for each parameter in GPipe's and torchgpipe's tables: the weight, its gradient, RMSProp's average."""


def parameters(make: Callable[[], nn.Module]) -> int:
    """Of a model that is built without weights."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())


def transformer_parameters(layers: int) -> int:
    """Of GPipe's Transformer-L: its blocks are alike, so that two models tell the rest."""
    one, two = (parameters(lambda number=number: GPipeTransformer(number)) for number in (1, 2))  # type: ignore[misc]
    return one + (layers - 1) * (two - one)


@cache
def sizes_of_stages(model: str, depth: int) -> tuple[int, ...]:
    """Parameters of Chimera's stages: as many blocks in each, the embeddings in the first, the head in the last.

    Args:
        model: Bert-48, GPT-2, or GPT-2, 32 layers.
        depth: D.
    """
    with torch.device("meta"):
        built = bert48() if model == "Bert-48" else gpt2_chimera(64 if model == "GPT-2" else 32)
    layers = find_layers(built, "bert.encoder.layer" if model == "Bert-48" else "transformer.h")
    placed = places_by_stage(built, layers, [len(layers) // depth] * depth)
    return tuple(sum(one.size for one in own) for own in placed)


def chimera_table4() -> Result:
    """The models of Chimera's evaluation, and the first stages in its performance model."""
    makers = {"Bert-48": bert48, "GPT-2": gpt2_chimera, "GPT-2, 32 layers": lambda: gpt2_chimera(32)}
    rows = [
        Row(f"parameters: {model}", count, parameters(makers[model]), "exact")
        for model, count in published("chimera", "Table 4").items()
    ]
    for model, stages in published("chimera", "Performance model").items():
        rows += [
            Row(
                f"parameters of stage 0: {model}, D={depth}",
                count,
                sizes_of_stages(model, int(depth))[0],
                "exact",
                note="from the performance model of the published code",
            )
            for depth, count in stages.items()
        ]
    return Result.of(rows)


def gpipe_table1(amoebanet: str, largest: str, transformer: str, memory: str, decimal: str) -> Result:
    """Parameters and model memory of both models; the activations need the accelerators.

    Args:
        amoebanet: tolerance of AmoebaNet's parameters.
        largest: of its largest one, printed with two digits.
        transformer: of the Transformer's parameters.
        memory: of the Transformers' memory.
        decimal: of AmoebaNet's memory, whose columns are in GB, not in GiB.
    """
    table, rows = published("gpipe", "Table 1"), []
    for model, row in table["AmoebaNet-D"].items():
        count = _amoebanet(model)
        tolerance = largest if model == "72,512" else amoebanet
        rows.append(Row(f"parameters: AmoebaNet-D({model})", row["parameters"], count, tolerance))
        note = f"the printed memory is {1e9 * row['model'] / count:.1f} bytes for each parameter, in other columns 12"
        found = count * RMSPROP / 1e9
        rows.append(Row(f"model memory: AmoebaNet-D({model})", row["model"], found, decimal, "GB", note=note))
    for layers, row in table["Transformer-L"].items():
        count = transformer_parameters(int(layers))
        swapped = layers == "3"
        rows.append(Row(f"parameters: Transformer-{layers}", row["parameters"], count, transformer))
        rows.append(
            Row(
                f"model memory: Transformer-{layers}",
                row["activations" if swapped else "model"],
                count * RMSPROP / GIB,
                memory,
                "GiB",
                note="printed as peak activation: the column's two values are swapped" if swapped else "",
            )
        )
    return Result.of(rows)


def gpipe_amoebanet_b(tolerance: str) -> Result:
    """The model of GPipe's accuracies."""
    count = parameters(lambda: AmoebaNet("b", 18, 512, wiring="tpu"))
    printed = published("gpipe", "Accuracy")["AmoebaNet-B(18,512)"]
    return Result.of([Row("parameters: AmoebaNet-B(18,512)", printed, count, tolerance)])


def torchgpipe_amoebanet(tolerance: str, memory: str) -> Result:
    """The table of AmoebaNet-D's memory: parameters and model memory."""
    rows = []
    for model, count, gib, balance in published("torchgpipe", "AmoebaNet-D memory"):
        found = _amoebanet(model)
        note = f"balance {balance}"
        rows.append(Row(f"parameters: AmoebaNet-D({model})", count, found, tolerance, note=note))
        rows.append(Row(f"model memory: AmoebaNet-D({model})", gib, found * RMSPROP / GIB, memory, "GiB"))
    return Result.of(rows)


def torchgpipe_unet(tolerance: str) -> Result:
    """The parameters in the table of U-Net's memory."""
    rows = []
    for model, count, _ in published("torchgpipe", "U-Net memory"):
        convolutions, channels = map(int, model.split(","))
        found = parameters(lambda convolutions=convolutions, channels=channels: UNet(convolutions, channels))  # type: ignore[misc]
        rows.append(Row(f"parameters: U-Net({model})", count, found, tolerance))
    return Result.of(rows)


def recomputation(tolerance: str) -> Result:
    """The pipelines of torchgpipe on one device: two micro-batches, of which the first is recomputed.

    Args:
        tolerance: of the speed over that without a pipeline.
    """
    rows = []
    for model in ("ResNet-101", "U-Net"):
        printed = published("torchgpipe", f"{model} speed")["pipelines"][0][2]
        note = "3 / 3.5 units of work: forward pass 1, backward pass 2, for half of the samples the forward pass again"
        what = f"{model}: speed of pipeline-1 over the baseline, counted"
        rows.append(Row(what, printed, 3 / 3.5, tolerance, note=note))
    return Result.of(rows)


def breakdown(tolerance: str) -> Result:
    """GPipe's step time by its parts: what counting says of the repeated forward passes; the rest is the machine's.

    Args:
        tolerance: of the ratio.
    """
    printed = dict(published("gpipe", "NeurIPS Table 4"))
    ratio = round(printed.pop("recompute") / printed.pop("computation"), 3)
    note = "one forward pass more for a forward pass and a backward pass of two"
    reason = "a share of the time of the authors' TPUs; the numbers of stages' layers and micro-batches are not printed"
    shares = [Row(f"share of {part}", share, None, unit="%", note=reason) for part, share in printed.items()]
    return Result.of([Row("recomputation over computation", ratio, 1 / 3, tolerance, note=note), *shares])


def _amoebanet(model: str) -> int:
    layers, filters = map(int, model.split(","))
    return parameters(lambda: AmoebaNet("d", layers, filters))
