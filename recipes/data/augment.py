"""Inception's augmentation, which AmoebaNet is trained with, and cutout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

ATTEMPTS = 10


@dataclass(frozen=True)
class Augmentation:
    """What happens to a training image.

    Args:
        size: side of the result in pixels.
        area: smallest and largest share of the image that is cut out and enlarged to the whole.
        ratio: smallest and largest width / height of what is cut out.
        flip: turn half of the images from left to right.
        cutout: side of a square that is blanked out at a random place; 0 leaves the image alone.
    """

    size: int
    area: tuple[float, float] = (0.05, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    cutout: int = 0

    def __call__(self, image: Image.Image, random: np.random.Generator) -> Tensor:
        """Returns a tensor of shape [3, size, size] with values from -1 to 1."""
        box = self._box(*image.size, random)
        result = _tensor(image.resize((self.size, self.size), Image.Resampling.BILINEAR, box))
        if self.flip and random.random() < 0.5:
            result = result.flip(-1)
        if self.cutout:
            row, column = random.integers(self.size, size=2) - self.cutout // 2
            result[:, max(0, row) : row + self.cutout, max(0, column) : column + self.cutout] = 0.0
        return result

    def _box(self, width: int, height: int, random: np.random.Generator) -> tuple[float, float, float, float]:
        for _ in range(ATTEMPTS):
            area = width * height * random.uniform(*self.area)
            ratio = math.exp(random.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            across, down = math.sqrt(area * ratio), math.sqrt(area / ratio)
            if across <= width and down <= height:
                left, top = random.uniform(0, width - across), random.uniform(0, height - down)
                return left, top, left + across, top + down
        return 0, 0, width, height


def centre(image: Image.Image, size: int, share: float = 0.875) -> Tensor:
    """The middle of an image, as validation sees it.

    Args:
        image: of any size.
        size: side of the result in pixels.
        share: of the image's shorter side that is seen.

    Returns:
        shape [3, size, size], values from -1 to 1.
    """
    side = min(image.size) * share
    left, top = ((length - side) / 2 for length in image.size)
    return _tensor(image.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side)))


def _tensor(image: Image.Image) -> Tensor:
    pixels = np.asarray(image, dtype=np.float32)
    return torch.from_numpy(pixels / 127.5 - 1).permute(2, 0, 1).contiguous()
