"""Labelled images for classification, as a LightningDataModule."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset as Rows
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from recipes.data import choice, files, image_sources, imagenet
from recipes.data.augment import Augmentation, centre
from recipes.data.loading import (
    Draw,
    ResumableData,
    draw_of,
    generator,
)
from recipes.errors import RecipeError

log = logging.getLogger(__name__)

NAME = "ILSVRC/imagenet-1k"
STAND_IN = ("digits", "scikit-learn's handwritten digits")
Transform = Callable[[Image.Image, np.random.Generator], Tensor]


class LabelledImages(Dataset[dict[str, Any]]):
    """Images as tensors, with their classes.

    Args:
        rows: columns "image" (a path or bytes) and "label".
        transform: an image and random numbers to a tensor.
        seed: decides about the random numbers.
        noise: standard deviation of the noise in a second copy of the image, "noisy"; 0 leaves the copy out.
    """

    def __init__(self, rows: Rows, transform: Transform, seed: int, noise: float = 0.0) -> None:
        self.rows, self.transform, self.seed, self.noise = rows, transform, seed, noise

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Draw | int) -> dict[str, Any]:
        draw = draw_of(key)
        row, random = self.rows[draw.sample], generator(self.seed, draw)
        image = self.transform(decoded(row["image"]), random)
        sample = {"image": image, "label": row["label"]}
        if self.noise:
            drawn = torch.from_numpy(random.standard_normal(image.shape, dtype=np.float32))
            sample["noisy"] = image + self.noise * drawn
        return sample


def decoded(image: Mapping[str, Any]) -> Image.Image:
    """Reads an image.

    Args:
        image: its "path" or its "bytes".

    Raises:
        RecipeError: names the file that cannot be read.
    """
    path, content = image.get("path"), image.get("bytes")
    try:
        if content is None and path is not None and imagenet.WITHIN in path:
            content = imagenet.content(path)
        return Image.open(path if content is None else io.BytesIO(content)).convert("RGB")  # type: ignore[arg-type]
    except (OSError, UnidentifiedImageError, SyntaxError) as error:
        raise RecipeError(
            f"The image {path or '(without a name)'} cannot be read: {error}.", hint="Replace it, or take it away."
        ) from error


@dataclass(kw_only=True, eq=False, repr=False)
class ImageFolder(ResumableData):
    """ImageNet, a local folder of images, or scikit-learn's handwritten digits.

    Args:
        source: "auto", "hub", "files" or "digits"; "auto" takes ``files`` where they are given, else the hub where it
            answers, else the digits.
        files: folder with subfolders ``train`` and ``validation``, each with one subfolder for every class; or with
            archives, as ImageNet has them.
        name: data set on the hub.
        image_size: side of the images in pixels: the papers use 224 to 480.
        crop_area: smallest and largest share of a training image that is cut out and enlarged.
        flip: turn half of the training images from left to right.
        cutout: side of a square that is blanked out in training images; 0 leaves them alone.
        noise: standard deviation of the noise in a second copy of every image, for values from -1 to 1; 0 leaves the
            copy out.
        classes: for which the model is built.
        labels: the classes that are taken, by their numbers, and numbered anew; None takes all.
        seed: of the order and the augmentation.
    """

    source: Literal["auto", "hub", "files", "digits"] = "auto"
    files: str | None = None
    name: str = NAME
    image_size: int = 224
    crop_area: tuple[float, float] = (0.05, 1.0)
    flip: bool = True
    cutout: int = 0
    noise: float = 0.0
    batch_size: int = 32
    classes: int = 1000
    labels: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.images: image_sources.Images | None = None
        self.chosen: str | None = None

    @override
    def prepare_data(self) -> None:
        """Runs in one process on every machine: downloads what the others will find in the cache."""
        if self.chosen is None:
            self.chosen = self._choose()
            if self.chosen == "hub":
                image_sources.hub(self.name)

    def _choose(self) -> str:
        return choice.choose(self.source, self.files, self.name, NAME, STAND_IN)

    @override
    def setup(self, stage: str) -> None:
        """Reads the list of images; they themselves are read when they are needed."""
        if self.images is not None:
            return
        source = self.chosen = choice.agreed(self.trainer, lambda: self.chosen or self._choose())
        readers: dict[str, Callable[[], image_sources.Images]] = {
            "hub": lambda: image_sources.hub(self.name),
            "files": lambda: image_sources.local_folder(files.chosen(self.files, self.name)),
            "digits": image_sources.digits,
        }
        images = readers[source]()
        if self.labels is not None:
            images = images.of(self.labels)
        # the digits may stand for a data set with more classes
        if images.classes > self.classes or (source != STAND_IN[0] and images.classes != self.classes):
            raise RecipeError(
                f"There are {images.classes} classes of images, the model is built for {self.classes}.",
                hint=f"Set data.classes={images.classes}.",
            )
        counts = [len(images.splits[split]) for split in ("train", "validation")]
        log.info("Images: %s; %s for training, %s for validation.", images.title, *(f"{count:,}" for count in counts))
        self.images = images

    @override
    def split(self, name: str) -> LabelledImages:
        if self.images is None:
            raise RecipeError("The data module is not set up.", hint="Call setup() first.")
        size, (least, most) = self.image_size, self.crop_area
        augmented = Augmentation(size, (least, most), flip=self.flip, cutout=self.cutout)
        transform = augmented if name == "train" else lambda image, random: centre(image, size)
        return LabelledImages(self.images.splits[name], transform, self.seed, self.noise)
