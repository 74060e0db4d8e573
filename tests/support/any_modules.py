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
            torch.randint(self.words, (24, *self.rows), generator=random)
            if self.words
            else torch.randn(24, *self.rows, generator=random, dtype=torch.float64)
        )
        y = torch.randn(24, *self.target, generator=random, dtype=torch.float64)
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


class Autoencoder(Lit):
    """The step calls the two halves itself, and ``forward`` the first one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.decoder(self.encoder(x)), x)


class Variational(Lit):
    """Two heads side by side, and methods that are no ``forward``."""

    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
            self.mu, self.log_var = nn.Linear(16, 4), nn.Linear(16, 4)
            self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))

        def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.encoder(x)
            return self.mu(h), self.log_var(h)

        def decode(self, z: Tensor) -> Tensor:
            return self.decoder(z)

    def __init__(self) -> None:
        super().__init__()
        self.vae = self.Vae()

    def forward(self, x: Tensor) -> Tensor:
        return self.vae.decode(self.vae.encode(x)[0])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        mu, log_var = self.vae.encode(x)
        divergence = -0.5 * (1 + log_var - mu**2 - log_var.exp()).sum(1).mean()
        return F.mse_loss(self.vae.decode(mu), x) + 0.1 * divergence


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


class Residual(_Image):
    """A stem and four ``layerN``, as residual networks are written."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3, 1, 1), nn.GroupNorm(2, 4)
        self.layer1 = nn.Sequential(_Residual(4, 4), _Residual(4, 4))
        self.layer2 = nn.Sequential(_Residual(4, 8, 2), _Residual(8, 8))
        self.layer3 = nn.Sequential(_Residual(8, 16, 2), _Residual(16, 16))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return self.fc(self.pool(self.layer3(self.layer2(self.layer1(h)))).flatten(1))


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


class Pyramid(_Image):
    """Features of several sizes, and one head that is called on each."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2, self.c3 = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.lateral1, self.lateral2, self.lateral3 = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.head = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.c1(x))
        two = F.relu(self.c2(one))
        three = F.relu(self.c3(two))
        p3 = self.lateral3(three)
        p2 = self.lateral2(two) + F.interpolate(p3, scale_factor=2)
        p1 = self.lateral1(one) + F.interpolate(p2, scale_factor=2)
        return sum(self.head(p).mean((2, 3)) for p in (p1, p2, p3))


class Dense(_Image):
    """Each block sees the results of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({f"block{i}": nn.Conv2d(3 + 4 * i, 4, 3, padding=1) for i in range(5)})
        self.classifier = nn.Linear(23, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for block in self.blocks.values():
            features.append(F.relu(block(torch.cat(features, 1))))
        return self.classifier(torch.cat(features, 1).mean((2, 3)))


class VisionTransformer(_Image):
    """A class token and positions are parameters of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.zeros(1, 5, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.transformer = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(h), -1, -1), h], 1) + self.positions
        return self.head(self.transformer(h)[:, 0])


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


class Seq2Seq(_Series):
    """An encoder and a decoder that loops over time."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.GRUCell(4, 12), nn.Linear(12, 4)

        def forward(self, h: Tensor) -> Tensor:
            y = h.new_zeros(len(h), 4)
            for _ in range(3):
                h = self.cell(y, h)
                y = self.out(h)
            return y

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.encoder = self.Decoder(), nn.GRU(5, 12, batch_first=True)
        self.between, self.embed = nn.Linear(12, 12), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        _, h = self.encoder(self.embed(x))
        return self.decoder(torch.tanh(self.between(h[0])))


class Wavelet(_Series):
    """Dilated convolutions whose results are summed at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.output = nn.Conv1d(5, 8, 1), nn.Linear(8, 4)
        self.filters = nn.ModuleList(nn.Conv1d(8, 8, 3, padding=2**i, dilation=2**i) for i in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h, total = self.inputs(x.transpose(1, 2)), 0
        for convolution, skip in zip(self.filters, self.skips, strict=True):
            h = h + torch.tanh(convolution(h))
            total = total + skip(h)
        return self.output(total.mean(2))


class Backcast(Lit):
    """Stacks of blocks that subtract what they explain and add up what they forecast."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
            self.backcast, self.forecast = nn.Linear(16, 8), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.fc(x)
            return self.backcast(h), self.forecast(h)

    def __init__(self) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(nn.ModuleList(self.Block() for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        total = 0
        for stack in self.stacks:
            for block in stack:
                back, forecast = block(x)
                x, total = x - back, total + forecast
        return total


class AttentiveSeries(_Series):
    """Attention over time between gated parts, with named inputs and a dictionary as the result."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.gate, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x: Tensor, skip: Tensor) -> Tensor:
            return self.norm(skip + self.value(x) * torch.sigmoid(self.gate(x)))

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Linear(5, 16), nn.LSTM(16, 16, batch_first=True)
        self.gate1, self.gate2 = self.Gate(), self.Gate()
        self.attention, self.output = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.embed(x)
        h = self.gate1(self.lstm(h)[0], skip=h)
        attended, weights = self.attention(h, h, h)
        return {"prediction": self.output(self.gate2(attended, skip=h)[:, -1]), "weights": weights}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x)["prediction"], y)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])["prediction"]


class Encoder(_Text):
    """A text encoder with a pooler, inside a model inside the module."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pooler = nn.Linear(16, 16)
            self.word, self.position, self.norm = nn.Embedding(20, 16), nn.Embedding(6, 16), nn.LayerNorm(16)
            self.layer = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3))

        def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
            h = self.norm(self.word(words) + self.position(torch.arange(words.shape[1], device=words.device)))
            for layer in self.layer:
                h = layer(h)
            return h, torch.tanh(self.pooler(h[:, 0]))

    def __init__(self) -> None:
        super().__init__()
        self.classifier, self.model = nn.Linear(16, 4), self.Model()

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.model(x)[1])


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


class TwoTowers(Lit):
    """Two towers, called in the order that is not that of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.right = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        right = self.right(x[:, 4:])
        return F.cosine_similarity(self.left(x[:, :4]), right)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self(x) - y[:, 0]).square().mean()


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


class Predictor(Lit):
    """Two passes over a backbone, then a predictor on both; targets are detached."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        one, two = self.backbone(x), self.backbone(x.flip(1))
        p, q = self.predictor(one), self.predictor(two)
        return -(F.cosine_similarity(p, two.detach()) + F.cosine_similarity(q, one.detach())).mean()


class Tasks(Lit):
    """A shared trunk, two heads and a dictionary of metrics."""

    def __init__(self) -> None:
        super().__init__()
        import torchmetrics

        self.metrics = nn.ModuleDict({"one": torchmetrics.MeanSquaredError(), "two": torchmetrics.MeanAbsoluteError()})
        self.metrics["one"].set_dtype(torch.float64)
        self.heads = nn.ModuleDict({"one": nn.Linear(16, 2), "two": nn.Linear(16, 2)})
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        return torch.cat([self.heads["one"](h), self.heads["two"](h)], 1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        found = self(x)
        self.metrics["one"](found[:, :2].contiguous(), y[:, :2].contiguous())
        self.log("one", self.metrics["one"])
        return F.mse_loss(found, y)


class Alternatives(Lit):
    """Lists of which one element is used; a bigger list of spare ones."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.first, self.third, self.fourth = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fourth(torch.tanh(self.third(torch.tanh(self.spare[2](torch.tanh(self.first(x)))))))


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
        batches = zip(x.split(8), y.split(8), ("two", "one", "three"), strict=True)
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


class SharedNorm(Lit):
    """One norm at several places between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.a, self.b, self.c, self.out = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.c(self.norm(self.b(self.norm(self.a(x)))))))


class Factorised(Lit):
    """Tables of numbers and of vectors beside a deep network."""

    rows, words, target = (4,), 6, (1,)

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.vectors = nn.Embedding(6, 1), nn.Embedding(6, 8)
        self.deep = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        v = 0.1 * self.vectors(x)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1, keepdim=True)
        return self.linear(x).sum(1) + pairs + self.deep(v.flatten(1))


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


class Graph(Lit):
    """Products with a dense adjacency that each sample brings along."""

    rows, target = (5, 9), (4,)

    class Convolution(nn.Module):
        def __init__(self, before: int, behind: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(before, behind) / before**0.5)
            self.bias = nn.Parameter(torch.zeros(behind))

        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            return adjacency @ x @ self.weight + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.readout, self.conv1 = nn.Linear(16, 4), self.Convolution(4, 16)
        self.conv2, self.conv3 = self.Convolution(16, 16), self.Convolution(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        adjacency, h = x[:, :, :5].softmax(-1), x[:, :, 5:]
        for convolution in (self.conv1, self.conv2, self.conv3):
            h = F.relu(convolution(h, adjacency))
        return self.readout(h.mean(1))


class Normed(Lit):
    """Weights that are computed from others before each use."""

    def __init__(self) -> None:
        super().__init__()
        wrap = nn.utils.parametrizations.weight_norm
        self.a, self.b = wrap(nn.Linear(8, 16)), wrap(nn.Linear(16, 16))
        self.c, self.out = wrap(nn.Linear(16, 16)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.c(F.relu(self.b(F.relu(self.a(x)))))))


class Frozen(Lit):
    """A frozen backbone under no_grad, and a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.backbone(x)
        return self.head(h)


class Episodes(Lit):
    """Prototypes of classes from one half of the batch classify the other half; neighbours are of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, x: Tensor, labels: Tensor, queries: Tensor) -> Tensor:
        support, found = self(torch.cat([x, queries])).chunk(2)
        classes = labels.unique()
        prototypes = torch.stack([support[labels == each].mean(0) for each in classes])
        return F.cross_entropy(-torch.cdist(found, prototypes), (labels[:, None] == classes).long().argmax(1))

    def data(self) -> DataLoader[Any]:
        x, _ = super().data().dataset.tensors
        return DataLoader(TensorDataset(x, torch.arange(24) % 8 // 2, x.flip(1)), batch_size=8)


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


class HighestBehind(Highest):
    """The same behind the first layer."""

    at = 1


class HighestInside(Highest):
    """The same in the second layer."""

    inside = True


DEPENDENT = [name for name, kind in MODULES.items() if isinstance(kind, type) and issubclass(kind, _Dependent)]
"""Those whose samples depend on each other."""
