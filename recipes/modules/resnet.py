"""ResNet-101 as an image classifier, trained as torchgpipe's accuracy benchmark trains it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recipes.models import resnet101
from recipes.models.resnet import BLOCKS
from recipes.modules.classifier import Classifier
from recipes.optim import MakeOptimizer, MakeScheduler


class ResNetClassifier(Classifier):
    """ResNet-101.

    Args:
        blocks: in each of the groups.
        width: channels of the stem and inside the first group's blocks.
        classes: number of classes.
        image_size: side of the images, for counting operations.
        label_smoothing: share of the target that is spread over all classes.
        weight_decay: L2, on convolutions and matrices only.
        optimizer: makes the optimizer from parameter groups; needed for training only.
        scheduler: makes the learning rate schedule from the optimizer and the number of steps; None keeps it constant.
    """

    def __init__(
        self,
        *,
        blocks: Sequence[int] = BLOCKS,
        width: int = 64,
        classes: int = 1000,
        image_size: int = 224,
        label_smoothing: float = 0.0,
        weight_decay: float = 1e-4,
        optimizer: MakeOptimizer | None = None,
        scheduler: MakeScheduler | None = None,
    ) -> None:
        super().__init__(classes, label_smoothing, weight_decay, optimizer, scheduler)
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        self.model = resnet101(classes, blocks=tuple(blocks), width=width)
        self.example_input_array = torch.zeros(1, 3, image_size, image_size)
