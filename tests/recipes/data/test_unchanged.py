"""What data modules make of given files: tokens, splits and orders to the digit, and what is drawn with a seed.

Whoever changes one of these changes what recipes train on.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.data.augment import Augmentation
from recipes.data.loading import shuffled
from recipes.data.segment_pairs import IGNORED, MaskedPairs, hide
from recipes.data.text import TextBlocks
from recipes.data.translation import ParallelText, drawn

TEXT = "rain falls on the old town while nobody came to see what day it was and sun or wind blew over its hills"


def sentences(number: int, seed: int) -> list[str]:
    drawn = random.Random(seed)
    return [f"{' '.join(drawn.choices(TEXT.split(), k=drawn.randint(4, 14))).capitalize()}." for _ in range(number)]


def digest(*values: Any) -> str:
    made = hashlib.sha256()
    for value in values:
        made.update(np.ascontiguousarray(value, dtype=np.int64).tobytes())
    return made.hexdigest()[:16]


def set_up(data: Any) -> Any:
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.fixture
def blocks(tmp_path: Path) -> Any:
    for name, seed in (("wiki.train.raw", 1), ("wiki.valid.raw", 2)):
        (tmp_path / name).write_text("".join(f" {line} \n" for line in sentences(400, seed)))
    settings = {"files": str(tmp_path), "cache": str(tmp_path / "cache")}
    return set_up(TextBlocks(**settings, vocabulary=320, block_length=32, batch_size=4))


@pytest.fixture
def pairs(tmp_path: Path) -> Any:
    text = "\n\n".join(" ".join(sentences(3 + number % 7, number)) for number in range(300))
    (tmp_path / "book.txt").write_text(text)
    settings = {"files": str(tmp_path / "book.txt"), "cache": str(tmp_path / "cache")}
    return set_up(MaskedPairs(**settings, vocabulary=320, length=48, batch_size=4))


@pytest.fixture
def translations(tmp_path: Path) -> Any:
    for split, number in (("train", 200), ("valid", 20)):
        for pair in ("de-en", "fr-en"):
            for language in pair.split("-"):
                text = "\n".join(sentences(number, len(split) + ord(language[0])))
                (tmp_path / f"{split}.{pair}.{language}").write_text(f"{text}\n")
    settings = {"files": str(tmp_path), "cache": str(tmp_path / "cache")}
    return set_up(ParallelText(**settings, vocabulary=320, length=24, batch_size=4))


def batches(data: Any) -> list[Any]:
    return [value for batch in [*data.train_dataloader(), *data.val_dataloader()] for value in batch.values()]


def test_blocks_are_the_same(blocks: Any) -> None:
    split = {name: np.stack([row["input_ids"] for row in blocks.split(name)]) for name in ("train", "validation")}
    assert {name: (rows.shape, digest(rows)) for name, rows in split.items()} == BLOCKS
    assert digest(*batches(blocks)) == BLOCKS_IN_ORDER


def test_sentences_and_their_runs_are_the_same(pairs: Any) -> None:
    found = {name: pairs.split(name) for name in ("train", "validation")}
    runs = {name: (len(split.sentences), digest(*split.sentences), digest(split.runs)) for name, split in found.items()}
    assert runs == RUNS
    assert digest(*batches(pairs)) == PAIRS_IN_ORDER


def test_translations_are_the_same(translations: Any) -> None:
    found = {
        name: digest(*(value for row in translations.split(name) for value in row.values()))
        for name in ("train", "validation")
    }
    assert found == TRANSLATIONS
    assert digest(*batches(translations)[::5]) == TRANSLATIONS_IN_ORDER


def test_orders_are_the_same() -> None:
    assert digest(shuffled(1000, 3, 2), drawn(801, 3, 2, sizes=(90, 700, 11), temperature=5.0)) == ORDERS


def test_masks_are_the_same_and_hide_as_told() -> None:
    tokens, places = np.arange(5, 105), np.arange(100)
    random = np.random.default_rng(7)
    draws = [hide(tokens, places, random, vocabulary=1000, mask=3) for _ in range(10_000)]
    seen, labels = (np.stack(part) for part in zip(*draws, strict=True))
    assert digest(seen, labels) == MASKS
    chosen = labels != IGNORED
    assert (chosen.sum(1) == 15).all()
    assert chosen.mean(0) == pytest.approx(np.full(100, 0.15), abs=0.018)
    assert (seen[chosen] == 3).mean() == pytest.approx(0.8, abs=0.005)
    assert (seen[chosen] == labels[chosen]).mean() == pytest.approx(0.1, abs=0.005)


def test_crops_are_the_same_and_as_large_as_told() -> None:
    transform, random = Augmentation(8), np.random.default_rng(7)
    boxes = np.array([transform._box(300, 200, random) for _ in range(10_000)])
    assert digest(np.round(boxes * 1000)) == CROPS
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area, ratio = width * height / 60_000, width / height
    assert 0.05 <= area.min() < 0.06
    assert (ratio.min(), ratio.max()) == pytest.approx((3 / 4, 4 / 3), rel=0.01)
    assert area.mean() == pytest.approx(0.373, abs=0.01)  # not one half: large cuts do not fit in every shape
    down, across = np.indices((200, 300))
    image = Image.fromarray(np.stack([down, across * 0.8, down * across / 240], axis=-1).astype(np.uint8))
    pixels = torch.stack([transform(image, random) for _ in range(20)])
    assert float(pixels.double().mean()) == pytest.approx(PIXELS, abs=1e-3)


BLOCKS = {"train": ((172, 32), "1fcee76e663e2e1b"), "validation": ((172, 32), "b93df333186a1104")}
BLOCKS_IN_ORDER = "3fec225e2428fd7f"
RUNS = {
    "train": (1787, "56c22dd96560c75f", "6c2a4574e1090f98"),
    "validation": (10, "8d214235373e1563", "5997f9c45d9db66c"),
}
PAIRS_IN_ORDER = "4043111ef767b5f4"
TRANSLATIONS = {"train": "8065890522b67b7d", "validation": "2c18d2540f0f8ecc"}
TRANSLATIONS_IN_ORDER = "f2c5bde638f2d730"
ORDERS = "acd4302e406d51f8"
MASKS = "adb37a7d960fad90"
CROPS = "f9d2621ef472c650"
PIXELS = -0.31649
