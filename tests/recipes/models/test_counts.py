"""Parameters of every published model, counted without a weight being made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from recipes.models import (
    AmoebaNet,
    GPipeTransformer,
    NMTTransformer,
    UNet,
    bert48,
    gpt2_chimera,
    resnet101,
)
from tests.support.pairs import slow_but


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = make()
    assert all(parameter.is_meta for parameter in model.parameters())
    return model


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


TPU = {"classes": 1001, "wiring": "tpu"}


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (partial(AmoebaNet, "d", 18, 208), 81_505_540),
        pytest.param(partial(AmoebaNet, "d", 18, 416), 319_024_120, marks=pytest.mark.slow),
        pytest.param(partial(AmoebaNet, "d", 18, 544), 542_734_840, marks=pytest.mark.slow),
        pytest.param(partial(AmoebaNet, "d", 36, 544), 1_055_832_376, marks=pytest.mark.slow),
        pytest.param(partial(AmoebaNet, "d", 72, 512), 1_844_858_344, marks=pytest.mark.slow),
        pytest.param(partial(AmoebaNet, "d", 18, 208, **TPU), 81_140_766, marks=pytest.mark.slow),
        pytest.param(partial(AmoebaNet, "d", 18, 416, **TPU), 317_548_353, marks=pytest.mark.slow),
        pytest.param(partial(AmoebaNet, "d", 18, 544, **TPU), 540_204_945, marks=pytest.mark.slow),
        pytest.param(partial(AmoebaNet, "d", 36, 544, **TPU), 1_053_302_481, marks=pytest.mark.slow),
        pytest.param(partial(AmoebaNet, "d", 72, 512, **TPU), 1_842_618_441, marks=pytest.mark.slow),
        (partial(AmoebaNet, "b", 18, 512, **TPU), 557_286_057),
        pytest.param(partial(AmoebaNet, "b", 18, 512, wiring="tpu"), 557_277_864, marks=pytest.mark.slow),
        (bert48, 669_790_012),
        (gpt2_chimera, 1_389_327_360),
        pytest.param(partial(gpt2_chimera, layers=32), 759_649_280, marks=pytest.mark.slow),
        (partial(GPipeTransformer, 3), 282_182_912),
        pytest.param(partial(GPipeTransformer, 13), 785_765_632, marks=pytest.mark.slow),
        (partial(GPipeTransformer, 103), 5_318_010_112),
        pytest.param(partial(GPipeTransformer, 415), 21_029_790_976, marks=pytest.mark.slow),
        (resnet101, 44_549_160),
        (partial(UNet, 5, 64), 232_687_328),
        pytest.param(partial(UNet, 6, 72), 362_157_516, marks=pytest.mark.slow),
        pytest.param(partial(UNet, 11, 128), 2_213_834_176, marks=pytest.mark.slow),
        pytest.param(partial(UNet, 24, 128), 4_993_859_008, marks=pytest.mark.slow),
        pytest.param(partial(UNet, 24, 160), 7_802_903_600, marks=pytest.mark.slow),
        pytest.param(partial(UNet, 48, 160), 15_822_206_000, marks=pytest.mark.slow),
    ],
    # not the function: its address would name the test, differently in each of the test runner's processes
    ids=lambda value: f"{value:,}" if isinstance(value, int) else getattr(value, "func", value).__name__,
)
def test_parameters_are_exactly_the_published_ones(make: Callable[[], nn.Module], parameters: int) -> None:
    assert count(on_meta(make)) == parameters


def test_the_largest_transformer_of_gpipe() -> None:
    # its 1,663 blocks are alike: one more of them on top of 103 tells the rest
    small, larger = (count(on_meta(partial(GPipeTransformer, layers))) for layers in (103, 104))
    assert small + (1663 - 103) * (larger - small) == 83_876_914_432


@pytest.mark.parametrize(("layers", "cells"), slow_but([(18, 24), (36, 42), (72, 78)], (18, 24)))
def test_amoebanet_has_six_layers_besides_its_normal_cells(layers: int, cells: int) -> None:
    assert len(on_meta(partial(AmoebaNet, "d", layers, 64)).layers) == cells  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "shared", "separate"),
    [
        ((6, 8192, 16), "0.408", "0.474"),
        pytest.param((24, 8192, 16), "1.239", "1.305", marks=pytest.mark.slow),
        pytest.param((12, 16384, 32), "1.239", "1.305", marks=pytest.mark.slow),
        pytest.param((32, 16384, 32), "3.086", "3.152", marks=pytest.mark.slow),
        pytest.param((64, 16384, 32), "6.041", "6.107", marks=pytest.mark.slow),
    ],
)
def test_multilingual_transformers(size: tuple[int, int, int], shared: str, separate: str) -> None:
    counts = [count(on_meta(partial(NMTTransformer, *size, shared_embeddings=one))) for one in (True, False)]
    assert [f"{number / 1e9:.3f}" for number in counts] == [shared, separate]


def test_stage_sizes_of_chimera() -> None:
    """The first stage of BERT-48 and GPT-2 as Chimera's performance model states it: embeddings and some blocks."""
    bert = on_meta(bert48)
    embeddings, block = count(bert.bert.embeddings), count(bert.bert.encoder.layer[0])  # type: ignore[union-attr,index]
    assert [embeddings + 48 // stages * block for stages in (2, 4, 8, 16)] == [
        334_092_288,
        182_937_600,
        107_360_256,
        69_571_584,
    ]
    gpt2 = on_meta(gpt2_chimera).transformer
    embeddings, block = count(gpt2.wte) + count(gpt2.wpe), count(gpt2.h[0])  # type: ignore[union-attr,arg-type,index]
    assert [embeddings + 64 // stages * block for stages in (8, 16, 32, 64)] == [
        223_059_200,
        144_349_440,
        104_994_560,
        85_317_120,
    ]
