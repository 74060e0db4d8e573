"""Networks other than Transformers, as users write them."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class LitResNet(L.LightningModule):
    """Hugging Face's ResNet with batch norm everywhere, unmodified."""

    layers = ("resnet.resnet.embedder", "resnet.resnet.encoder.stages.*.layers")

    def __init__(self) -> None:
        super().__init__()
        config = hf.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=3
        )
        self.resnet = hf.ResNetForImageClassification(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss: Tensor = self.resnet(pixel_values=images, labels=labels).loss
        self.log("loss", loss, on_step=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def data(self) -> DataLoader[Any]:
        torch.manual_seed(1)
        return DataLoader(TensorDataset(torch.randn(32, 3, 16, 16).double(), torch.randint(0, 3, (32,))), batch_size=8)


class LitDropout(L.LightningModule):
    """Dropout inside and outside the layers."""

    layers = ("blocks",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4)))
        self.head = nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        h = F.dropout(self.embed(x), 0.2)
        loss = F.mse_loss(self.head(self.blocks(h)) + 0.1 * torch.randn(1), x.sum(1, keepdim=True))
        self.log("loss", loss, on_step=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def data(self) -> DataLoader[Any]:
        torch.manual_seed(1)
        return DataLoader(TensorDataset(torch.randn(48, 6).double()), batch_size=12)


class LitHalfDropout(LitDropout):
    """The same batches dealt out to two replicas, in order."""

    def data(self) -> DataLoader[Any]:
        dataset = super().data().dataset
        sampler: Any = DistributedSampler(dataset, 2, int(os.environ["LOCAL_RANK"]), shuffle=False)
        return DataLoader(dataset, batch_size=6, sampler=sampler)
