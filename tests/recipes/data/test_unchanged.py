"""What data modules draw with a seed: orders, masks and crops, to the digit.

Whoever changes one of these changes what recipes train on.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.data.augment import Augmentation
from recipes.data.loading import shuffled
from recipes.data.segment_pairs import IGNORED, hide
from recipes.data.translation import drawn


def digest(*values: Any) -> str:
    made = hashlib.sha256()
    for value in values:
        made.update(np.ascontiguousarray(value, dtype=np.int64).tobytes())
    return made.hexdigest()[:16]


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


ORDERS = "acd4302e406d51f8"
MASKS = "adb37a7d960fad90"
CROPS = "f9d2621ef472c650"
PIXELS = -0.31649
