"""The recipes' models, built plain and as the ranks of a pipeline build them, are the same bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from recipes.modules.amoebanet import AmoebaNetClassifier
from recipes.modules.bert import BERT
from recipes.modules.gpipe_transformer import TransformerLM
from recipes.modules.gpt2 import GPT2
from recipes.modules.nmt import Translator
from recipes.modules.resnet import ResNetClassifier
from recipes.modules.unet import Denoiser
from tests.support.built import assert_built_alike

MODELS: dict[str, Callable[[], nn.Module]] = {
    "amoebanet_imagenet": lambda: AmoebaNetClassifier(network="d", layers=6, filters=64, classes=10, image_size=64),
    "bert48_wikipedia": lambda: BERT(vocabulary=300, positions=64, width=96, layers=4, heads=4),
    "gpt2_wikitext2": lambda: GPT2(vocabulary=300, positions=64, width=96, layers=4, heads=4),
    "gpt2_wikitext103": lambda: GPT2(vocabulary=300, positions=64, width=96, layers=4, heads=4, tied=False),
    "transformer_wikitext103": lambda: TransformerLM(
        layers=4, vocabulary=300, positions=64, width=96, inner=192, heads=4
    ),
    "nmt_multilingual": lambda: Translator(layers=3, inner=192, heads=4, vocabulary=300, width=96, head_size=24),
    "resnet101_imagenet": lambda: ResNetClassifier(blocks=(2, 2, 2, 2), width=32, classes=10),
    "unet_imagenet": lambda: Denoiser(convolutions=2, channels=16, depth=3),
}


FAST = ("gpt2_wikitext2", "nmt_multilingual")
CASES = [
    *(pytest.param(recipe, (1, 2, 4), marks=pytest.mark.slow) for recipe in MODELS),
    *((one, (2,)) for one in FAST),
]


@pytest.mark.parametrize(("recipe", "ranks"), CASES)
def test_built_alike(recipe: str, ranks: tuple[int, ...]) -> None:
    assert_built_alike(MODELS[recipe], ranks=ranks)
