"""AmoebaNet as an image classifier, trained as the TPU reference trains it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from recipes.models import AmoebaNet
from recipes.models.amoebanet_parts import DropPath
from recipes.modules.classifier import Classifier


class AmoebaNetClassifier(Classifier, network=AmoebaNet, given=("auxiliary_for",)):
    """AmoebaNet with label smoothing, an auxiliary loss, and paths that are dropped more often as training goes on.

    Args:
        classes: number of classes.
        drop_path: probability with which a path is dropped at the end of training; it rises from 0 over all steps.
        label_smoothing: share of the target that is spread over all classes.
        auxiliary_weight: of the auxiliary head's loss; 0 leaves the head out.
        image_size: side of the training images, which the auxiliary head is built for.
        weight_decay: L2, on convolutions and matrices only.
        network: further arguments of `recipes.models.AmoebaNet`.
    """

    def __init__(
        self,
        *,
        classes: int,
        drop_path: float = 0.3,
        label_smoothing: float = 0.1,
        auxiliary_weight: float = 0.4,
        image_size: int = 224,
        weight_decay: float = 4e-5,
        **network: Any,
    ) -> None:
        super().__init__(classes, label_smoothing, weight_decay)
        self.save_hyperparameters()
        self.drop_path, self.auxiliary_weight = drop_path, auxiliary_weight
        self.model = AmoebaNet(classes=classes, auxiliary_for=image_size if auxiliary_weight else None, **network)
        self.head = (f"model.layers.{len(self.model.layers) - 1}.", "model.auxiliary_head.")
        self.example_input_array = torch.zeros(1, 3, image_size, image_size)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        progress = self.trainer.global_step / max(1.0, float(self.trainer.estimated_stepping_batches))
        for module in self.modules():
            if isinstance(module, DropPath):
                module.keep = 1 - self.drop_path * min(1.0, progress)

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(batch["image"])
        logits, auxiliary = output if isinstance(output, tuple) else (output, None)
        loss = self.smoothed_loss(logits, batch["label"])
        if auxiliary is not None:
            loss = loss + self.auxiliary_weight * self.smoothed_loss(auxiliary, batch["label"])
        self.log("train_loss", loss, prog_bar=True)
        return loss
