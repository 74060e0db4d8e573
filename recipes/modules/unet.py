"""torchgpipe's U-Net, restoring images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.image import PeakSignalNoiseRatio
from typing_extensions import override

from recipes.models import UNet
from recipes.modules.trained import Trained


class Denoiser(Trained, network=UNet, given=("inputs", "outputs")):
    """U-Net (B, C) that finds the brightness of an image under noise.

    torchgpipe times the network on random numbers; this is a task for it, with one channel to predict as there.

    Args:
        image_size: side of the images, for counting operations.
        weight_decay: on convolutions only.
        network: further arguments of `recipes.models.UNet`.
    """

    def __init__(self, *, image_size: int = 192, weight_decay: float = 0.0, **network: Any) -> None:
        super().__init__(weight_decay)
        self.save_hyperparameters()
        self.model = UNet(inputs=3, outputs=1, **network)
        self.example_input_array = torch.zeros(1, 3, image_size, image_size)
        self.val_psnr = PeakSignalNoiseRatio(data_range=2.0)  # decibels, for values from -1 to 1

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.model(batch["noisy"]), brightness(batch["image"]))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        restored, true = self.model(batch["noisy"]), brightness(batch["image"])
        self.val_psnr.update(restored, true)
        self.log("val_loss", F.mse_loss(restored, true), batch_size=len(true), prog_bar=True, sync_dist=True)
        self.log("val_psnr", self.val_psnr, batch_size=len(true))


def brightness(images: Tensor) -> Tensor:
    """The mean of an image's channels, shape [batch, 1, height, width]."""
    return images.mean(1, keepdim=True)
