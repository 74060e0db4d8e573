"""Small LightningModules in the shapes that other people write: hardly any of them has one list of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

MODULES: dict[str, Callable[[], Lit]] = {}
"""All of them by name."""


class Lit(L.LightningModule):
    """Regression of the target; subclasses have layers and ``forward``.

    ``rows`` is the shape of one sample, ``words`` the number of words if it holds words.
    """

    rows: tuple[int, ...] = (8,)
    words = 0
    target: tuple[int, ...] = (4,)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__name__.startswith("_"):
            MODULES[cls.__name__] = cls

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def data(self) -> DataLoader[Any]:
        random = torch.Generator().manual_seed(5)
        x = (
            torch.randint(self.words, (16, *self.rows), generator=random)
            if self.words
            else torch.randn(16, *self.rows, generator=random, dtype=torch.float64)
        )
        y = torch.randn(16, *self.target, generator=random, dtype=torch.float64)
        return DataLoader(TensorDataset(x, y), batch_size=8)


class _Image(Lit):
    rows = (3, 8, 8)


class _Series(Lit):
    rows = (6, 5)


class _Text(Lit):
    rows, words = (6,), 20


class Chain(Lit):
    """Children that are called one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.fc4, self.out = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.fc4(F.relu(self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))))))


class Backwards(Lit):
    """Registered in the reverse order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 4)
        self.decoder = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.decoder(torch.tanh(self.encoder(x))))


class _Residual(nn.Module):
    def __init__(self, before: int, behind: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, behind, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, behind), nn.GroupNorm(2, behind)
        self.conv2 = nn.Conv2d(behind, behind, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(before, behind, 1, stride) if before != behind else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(h + self.shortcut(x))


class ResidualSequence(_Image):
    """One sequence of convolutions: the parameters are at its end, the work at its beginning."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [_Residual(3, 4), _Residual(4, 4), _Residual(4, 8, 2), _Residual(8, 16, 2), _Residual(16, 16)]
        self.net = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Segmentation(_Image):
    """An encoder whose results skip to a decoder, which is registered first."""

    target = (2, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.up1, self.up2 = nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)
        self.merge1, self.merge2 = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.middle, self.head = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.down1(x))
        two = F.relu(self.down2(F.max_pool2d(one, 2)))
        h = F.relu(self.middle(F.max_pool2d(two, 2)))
        h = F.relu(self.merge1(torch.cat([self.up1(h), two], 1)))
        h = F.relu(self.merge2(torch.cat([self.up2(h), one], 1)))
        return self.head(h)


class Recurrent(_Series):
    """A recurrent module with a projector."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.projector = nn.LSTM(5, 12, batch_first=True), nn.Linear(12, 4)
        self.norm, self.embed = nn.LayerNorm(12), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(self.embed(x))
        return self.projector(self.norm(out[:, -1]))


class Packed(_Text):
    """A recurrent module over words that are packed by their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.rnn, self.table = nn.Linear(12, 4), nn.LSTM(12, 12, batch_first=True), nn.Embedding(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x % 3 > 0).sum(1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(self.table(x), lengths, batch_first=True, enforce_sorted=False)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(padded.sum(1))


class Translation(_Text):
    """torch's own Transformer, with one table of words for both sides and for the output."""

    target = ()

    def __init__(self) -> None:
        super().__init__()
        self.words_table = nn.Embedding(20, 16)
        self.transformer = nn.Transformer(16, 2, 2, 2, 32, 0.0, batch_first=True)
        self.output = nn.Linear(16, 20, bias=False)
        self.output.weight = self.words_table.weight

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1] - 1, dtype=torch.float64, device=x.device)
        return self.output(self.transformer(self.words_table(x), self.words_table(x[:, :-1]), tgt_mask=mask))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x).flatten(0, 1), x[:, 1:].flatten())


class LanguageModel(_Text):
    """Blocks as attributes of their own numbers, and a final norm."""

    target = ()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln1, self.ln2 = nn.LayerNorm(16), nn.LayerNorm(16)
            self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
            self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.ln1(x)).chunk(3, -1)
            x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
            return x + self.mlp(self.ln2(x))

    def __init__(self) -> None:
        super().__init__()
        self.head, self.table = nn.Linear(16, 20), nn.Embedding(20, 16)
        for i in range(3):
            setattr(self, f"block_{i}", self.Block())
        self.final = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        for i in range(3):
            h = getattr(self, f"block_{i}")(h)
        return self.head(self.final(h))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


class Fusion(_Text):
    """An image tower and a text tower meet in a head."""

    target = (3, 4, 4)

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        self.text = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(48, 8))
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 8))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(torch.cat([self.image(y), self.text(x)], 1)).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.text(x)


class Siamese(Lit):
    """Two passes over a backbone and a projector."""

    def __init__(self) -> None:
        super().__init__()
        self.projector = nn.Linear(16, 8)
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.projector(self.backbone(x))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return -F.cosine_similarity(self(x), self(x.flip(1))).mean()


class HeadOfTask(Lit):
    """A trunk, and the head of the task that the whole batch is of."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({task: nn.Linear(16, 4) for task in ("one", "two", "three")})
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())

    def forward(self, x: Tensor, task: str) -> Tensor:
        return self.heads[task](self.trunk(x))

    def loss(self, x: Tensor, y: Tensor, task: str) -> Tensor:
        return F.mse_loss(self(x, task), y)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0], batch[2])

    def data(self) -> DataLoader[Any]:
        x, y = super().data().dataset.tensors
        batches = zip(x.split(6), y.split(6), ("two", "one", "three"), strict=True)
        return DataLoader(list(batches), batch_size=None)


class Flow(Lit):
    """Couplings that return two tensors; predictions go back through them by another method than ``forward``."""

    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            kept, changed = x.chunk(2, 1)
            scale, shift = self.net(kept).chunk(2, 1)
            return torch.cat([changed * scale.tanh().exp() + shift, kept], 1), scale.tanh().sum(1)

        def inverse(self, x: Tensor) -> Tensor:
            changed, kept = x.chunk(2, 1)
            scale, shift = self.net(kept).chunk(2, 1)
            return torch.cat([kept, (changed - shift) / scale.tanh().exp()], 1)

    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(self.Coupling() for _ in range(4))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        volume = torch.zeros(len(x), dtype=x.dtype)
        for coupling in self.couplings:
            x, change = coupling(x)
            volume = volume + change
        return (0.5 * x.square().sum(1) - volume).mean()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        x: Tensor = batch[0]
        for coupling in reversed(self.couplings):
            x = coupling.inverse(x)
        return x


class Experts(Lit):
    """Experts side by side, weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.inputs = nn.Linear(16, 3), nn.Linear(8, 16)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3))
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.inputs(x))
        weights = self.gate(h).softmax(-1)
        return self.out(sum(weights[:, i : i + 1] * expert(h) for i, expert in enumerate(self.experts)))


class _Dependent(Lit):
    """What it makes of a sample depends on the others in its batch, before the layer ``at``, or in it if ``inside``."""

    at, inside = 0, False

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.mixed(x, self.training))

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.fc4, self.out = nn.Linear(8, 8), nn.Linear(8, 4)
        if self.inside:
            self.fc2 = self.Layer(8, 8)
            self.fc2.mixed = self.mixed

    @staticmethod
    def mixed(x: Tensor, training: bool) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate((self.fc1, self.fc2, self.fc3, self.fc4)):
            x = torch.tanh(layer(self.mixed(x, self.training) if number == self.at and not self.inside else x))
        return self.out(x)


class Scaled(_Dependent):
    """The scaler of a time series: without an observation it falls back to the mean over the batch."""

    @staticmethod
    def mixed(x: Tensor, training: bool) -> Tensor:
        seen = (x != 0).sum(1, keepdim=True)
        own = x.abs().sum(1, keepdim=True) / seen.clamp(min=1)
        scale = torch.where(seen > 0, own, own.sum(0) / (seen > 0).sum(0).clamp(min=1))
        return torch.cat([x[:, 1:], scale], 1)

    def data(self) -> DataLoader[Any]:
        x, y = super().data().dataset.tensors
        x[::3] = 0.0  # never observed
        return DataLoader(TensorDataset(x, y), batch_size=8)


class Normalised(_Dependent):
    """Normalisation over the batch that is written by hand."""

    @staticmethod
    def mixed(x: Tensor, training: bool) -> Tensor:
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1.0).sqrt()


class NormalisedBehind(Normalised):
    """The same behind the first layer."""

    at = 1


class Highest(_Dependent):
    """Keeps the columns that are highest in the mean over the batch: in training alone, by the sample otherwise."""

    @staticmethod
    def mixed(x: Tensor, training: bool) -> Tensor:
        means = x.abs().mean(0, keepdim=True).expand_as(x) if training else x.abs()
        return x * (means >= means.topk(4, 1).values[:, -1:])


class HighestInside(Highest):
    """The same in the second layer."""

    inside = True


DEPENDENT = [name for name, kind in MODULES.items() if isinstance(kind, type) and issubclass(kind, _Dependent)]
"""Those whose samples depend on each other."""
