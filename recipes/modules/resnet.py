"""ResNet-101 as an image classifier, trained as torchgpipe's accuracy benchmark trains it."""

from __future__ import annotations

from typing import Any

import torch

from recipes.models import resnet101
from recipes.modules.classifier import Classifier


class ResNetClassifier(Classifier, network=resnet101):
    """ResNet-101.

    Args:
        classes: number of classes.
        image_size: side of the images, for counting operations.
        label_smoothing: share of the target that is spread over all classes.
        weight_decay: L2, on convolutions and matrices only.
        network: further arguments of `recipes.models.resnet101`.
    """

    def __init__(
        self,
        *,
        classes: int,
        image_size: int = 224,
        label_smoothing: float = 0.0,
        weight_decay: float = 1e-4,
        **network: Any,
    ) -> None:
        super().__init__(classes, label_smoothing, weight_decay)
        self.save_hyperparameters()
        self.model = resnet101(classes, **network)
        self.example_input_array = torch.zeros(1, 3, image_size, image_size)
