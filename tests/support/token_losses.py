"""Models of tokens with losses that are means over samples, and losses that are not; with their batches."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

VOCABULARY, WIDTH = 40, 8
PADDING = -1  # not -100: what is left out of a loss shows in the loss alone
MESSAGE = "not a mean over the samples"


class Layer(nn.Module):
    """Counts its calls."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))
        self.shapes: list[Any] = []
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.shapes = [*self.shapes, x.shape]
        return self.drop(torch.tanh(self.linear(x)))


class Tokens(L.LightningModule):
    """Predicts a class for every token; the loss is to be written.

    Args:
        early: dropout before the last stage.
    """

    def __init__(self, early: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.drop = nn.Dropout(early)
        self.layers = nn.ModuleList(Layer(early if number < 3 else 0.3) for number in range(4))
        self.late = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()
        self.steps: list[int] = []
        self.mean = torchmetrics.MeanMetric()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        x = self.late(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps.append(batch_idx)
        loss = self.loss(self(batch["input_ids"]), batch["labels"])
        self.mean(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", self.mean)
        return loss

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        raise NotImplementedError

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class MeanOfSamples(Tokens):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, -1], labels[:, -1].clamp(min=0))


class SumOfTokens(Tokens):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PADDING, reduction="sum")


class MeanOfTokens(Tokens):
    """As Hugging Face models do it, but for the label of padding."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PADDING)


class Weighted(Tokens):
    """Classes count differently."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        weight = torch.linspace(0.1, 2, VOCABULARY, dtype=logits.dtype)
        return F.cross_entropy(logits[:, -1], labels[:, -1].clamp(min=0), weight=weight)


class Contrastive(Tokens):
    """Compares the samples of a batch with each other."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        features = logits.mean(1)
        return F.cross_entropy(features @ features.T, torch.arange(len(features)))


class Views(Tokens):
    """Runs two views of every sample in one batch, and compares samples with each other."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(torch.cat([ids, ids.flip(1)]))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        one, other = logits.mean(1).chunk(2)
        return F.cross_entropy(one @ other.T, torch.arange(len(one)))


class MeanOfViews(Views):
    """Compares each sample with its own other view."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        one, other = logits.chunk(2)
        return F.mse_loss(one, other)


class MeanOfCopies(Tokens):
    """Has three copies of every sample side by side."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids.repeat_interleave(3, 0))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return logits.unflatten(0, (len(labels), 3)).std(1).mean()


class Random(MeanOfTokens):
    """Is random in a way that cannot be switched off: not to be judged."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits + torch.randn_like(logits), labels)


class Kept(MeanOfSamples):
    """Changes in each step what its layers compute with: other losses from run to run, and none of them random."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for layer in self.layers:
            layer.scale *= 0.9
        return super().training_step(batch, batch_idx)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x) * layer.scale
        return self.head(x)


class KeptTokens(Kept):
    """The same with a loss that is no mean over samples."""

    loss = MeanOfTokens.loss


class Heads(MeanOfSamples):
    """A bias belongs to all samples, for as many heads as a micro-batch has samples: that of T5 is such a one."""

    def __init__(self, early: float = 0.0) -> None:
        super().__init__(early)
        self.bias = nn.Parameter(torch.rand(1, 1, 2, WIDTH // 2).double())

    def forward(self, ids: Tensor) -> Tensor:
        x, bias = self.embed(ids), self.bias.exp()
        for layer in self.layers:
            x = (layer(x).unflatten(-1, (2, -1)) * bias).flatten(-2)
        return self.head(x)


class HeadsOfTokens(Heads):
    """The same with a loss that is no mean over samples."""

    loss = MeanOfTokens.loss


class Chosen(MeanOfSamples):
    """Runs its layers on some of the tokens alone, as many in each sample as there happen to be."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embed(ids)).flatten(0, 1)
        places = (ids % 3 != 0).flatten().nonzero()[:, 0]
        chosen = x[places]
        for layer in self.layers:
            chosen = layer(chosen)
        x = x.index_copy(0, places, chosen).unflatten(0, ids.shape)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Router(nn.Module):
    """Chooses tokens by their values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(x)
        return x, (x[:, 0] > 0).nonzero()[:, 0]


class Routed(MeanOfSamples):
    """A layer chooses the tokens: its numbers are positions within the micro-batch."""

    def __init__(self, early: float = 0.0) -> None:
        super().__init__(early)
        self.layers[0] = Router().double()

    def forward(self, ids: Tensor) -> Tensor:
        x, places = self.layers[0](self.embed(ids).flatten(0, 1))
        chosen = x[places]
        for layer in self.layers[1:]:
            chosen = layer(chosen)
        return self.head(x.index_copy(0, places, chosen).unflatten(0, ids.shape))


class Balanced(nn.Module):
    """Says beside its output how evenly it uses its channels, one number for all samples, as routers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(x)
        return x, x.softmax(-1).mean((0, 1)).square().sum()


class LoggedBalance(MeanOfSamples):
    """Logs what a layer says of all samples of a micro-batch together."""

    def __init__(self, early: float = 0.0) -> None:
        super().__init__(early)
        self.layers[0] = Balanced().double()

    def forward(self, ids: Tensor) -> Tensor:
        x, self.balance = self.layers[0](self.embed(ids))
        for layer in self.layers[1:]:
            x = layer(x)
        self.log("balance", self.balance)
        return self.head(x)


class LoggedBalanceOfTokens(LoggedBalance, MeanOfTokens):
    """... and its loss is a mean over tokens that are not padding."""

    loss = MeanOfTokens.loss


class LossWithBalance(LoggedBalance):
    """Adds it to its loss."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) + self.balance


class LayerDrop(MeanOfSamples):
    """Leaves layers of the last stage out at random, as some models of Hugging Face do."""

    probability = 0.4

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            y = layer(x)
            if not (self.training and torch.rand([]) < self.probability and number > 1):
                x = y
        return self.head(x)


class SeldomDrop(LayerDrop):
    """... and seldom."""

    probability = 0.05


class TimeFirst(MeanOfSamples):
    """Has time as the first dimension inside."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embed(ids.T))
        for layer in self.layers:
            x = layer(x.cumsum(0))
        return self.head(x).transpose(0, 1)


class Picky(MeanOfTokens):
    """Refuses the size that two micro-batches have together."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if len(logits) > 3:
            raise ValueError("too many samples")
        return super().loss(logits, labels)


class Batches:
    """Token batches with padding of different length for every sample."""

    def __init__(self, samples: int = 6, number: int = 1) -> None:
        torch.manual_seed(5)
        self.batches = []
        for _ in range(number):
            ids = torch.randint(VOCABULARY, (samples, 7))
            lengths = torch.randint(1, 8, (samples, 1))
            self.batches.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(7) >= lengths, PADDING)})
