"""A convolutional network with batch norm on scikit-learn's digits, in a pipeline of two stages.

    python examples/digits.py --devices 2

On two machines, each with two devices, start on both (with MASTER the first one's address):

    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint MASTER:29400 \
        examples/digits.py --devices 2 --nodes 2
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

import lightning_pipe


def block(channels: int, out: int, stride: int = 1) -> nn.Sequential:
    """A convolution with batch norm: statistics are those of whole batches, as on one device."""
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()
    )


class Digits(L.LightningModule):
    """An ordinary LightningModule: nothing in it knows of a pipeline.

    Args:
        width: channels of the first layer.
        lr: learning rate.
    """

    def __init__(self, width: int = 16, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            block(1, width),
            block(width, width),
            block(width, 2 * width, stride=2),
            block(2 * width, 2 * width),
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10)),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of one micro-batch."""
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Accuracy, counted over whole batches."""
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


class DigitsData(L.LightningDataModule):
    """1,797 images of 8 x 8 pixels, which come with scikit-learn: nothing is downloaded.

    Args:
        batch_size: images in a batch, which the pipeline divides into micro-batches.
    """

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Divide the images, equally on all processes."""
        images, labels = load_digits(return_X_y=True)
        whole = TensorDataset(torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels))
        self.parts = random_split(whole, [1440, 357], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader:
        """Shuffled."""
        return DataLoader(self.parts[0], self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """In order."""
        return DataLoader(self.parts[1], self.batch_size)


def main() -> None:
    """Train, and print the accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--accelerator", default="auto")
    arguments = parser.parse_args()
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy=lightning_pipe.PipeStrategy(schedule=arguments.schedule),
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        num_nodes=arguments.nodes,
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(), DigitsData())
    if trainer.is_global_zero:
        print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f}")


if __name__ == "__main__":
    main()
