"""Models that hand something unusual from layer to layer, or past some of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo.base import WIDTH, Block, Regression


class Structures(Regression):
    """Dictionaries, None, whole numbers and integer tensors go from layer to layer."""

    class Layer(Block):
        def forward(self, state: dict[str, Any]) -> dict[str, Any]:
            x = super().forward(state["x"])
            chosen = torch.where(state["even"].unsqueeze(-1), x, -x) if state["mask"] is None else x
            return {"x": chosen, "even": ~state["even"], "count": state["count"] + 1, "mask": None, "depth": 3}

    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {
            "x": self.embed(x),
            "even": x[:, 0] > 0,
            "count": torch.zeros(len(x), dtype=torch.long, device=x.device),
        }
        state["mask"] = None
        for layer in self.layers:
            state = layer(state)
        return self.head(state["x"]) * state["count"].unsqueeze(-1) / state["depth"]


class NonContiguous(Regression):
    """Layers return views that are not contiguous, and their gradients are expanded."""

    class Layer(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mT if x.shape[-1] != WIDTH else x).mT

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(torch.stack([batch["x"], -batch["x"], batch["x"] + 1], 1))
        for layer in self.layers:
            x = layer(x)
        return x.sum((1, 2)).mean() / 10 + F.mse_loss(self.head(x[..., 0]), batch["y"])


class InPlace(Regression):
    """Layers begin by changing their input in place."""

    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.add_(0.5).clamp_(min=-0.1))


class Skips(Regression):
    """Tensors are carried past several layers and taken back in reverse order."""

    depth = 6

    def forward(self, x: Tensor) -> Tensor:
        x, carried = self.embed(x), []
        for layer in self.layers[:3]:
            x = layer(x)
            carried.append(x)
        for layer in self.layers[3:]:
            x = layer(torch.sin(x) + carried.pop())
        return self.head(x)


class Auxiliary(Regression):
    """Layers return a pair: the activation and a loss of their own, summed outside (a mixture of experts)."""

    class Layer(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = super().forward(x)
            return x, x.square().mean()

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x, total = self.embed(batch["x"]), torch.zeros((), dtype=batch["x"].dtype, device=batch["x"].device)
        for layer in self.layers:
            x, own = layer(x)
            total = total + own
        return F.mse_loss(self.head(x), batch["y"]) + 0.1 * total


class Detached(Regression):
    """An early activation comes back without gradient, as a target and under no_grad."""

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = first = self.embed(batch["x"])
        for layer in self.layers:
            x = layer(x)
            with torch.no_grad():
                first = 0.5 * first + x
        return F.mse_loss(self.head(x), batch["y"]) + F.mse_loss(x, first.detach())


class Keywords(Regression):
    """Layers take keywords: a mask made from the batch, a tensor computed outside, a flag."""

    class Layer(Block):
        def forward(self, x: Tensor, *, mask: Tensor, context: Tensor | None = None, negate: bool = False) -> Tensor:
            x = super().forward(x).masked_fill(mask, 0.0) + (0 if context is None else context)
            return -x if negate else x

    def __init__(self) -> None:
        super().__init__()
        self.context = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 1
        context = self.context(x) if bool(mask.any().item()) else None
        x = self.embed(x)
        for i, layer in enumerate(self.layers):
            x = layer(x, mask=mask, context=context, negate=i % 2 == 1)
        return self.head(x)


class Branches(Regression):
    """The step takes another path through the code for every second batch."""

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch["x"])
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 1 and batch_idx % 2:
                x = x + torch.sin(3 * x)
        return F.mse_loss(self.head(x), batch["y"])


class Selects(Regression):
    """Rows are selected by masks: shapes depend on the batch's values, and on those of a layer."""

    depth = 5

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        chosen = batch["x"][:, 0] > -0.5
        x = self.embed(batch["x"])[chosen]
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i == 1:
                x = x[x[:, 0] > -0.2]
            if i == 3:
                x = x.masked_select(x[:, :1] > -0.8).view(-1, WIDTH)
        return self.head(x).square().sum() / len(batch["x"])


class Appends(Regression):
    """Keeps the outputs of its steps and reads them at the end of the epoch; the step returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Tensor] = []
        self.seen = 0

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        self.outs.append(loss.detach() * len(batch["x"]))
        self.seen += len(batch["x"])
        return {"loss": loss, "twice": 2 * loss.detach()}

    def on_train_epoch_end(self) -> None:
        self.log("mean_of_outs", torch.stack(self.outs).sum() / self.seen)
        self.outs.clear()
        self.seen = 0


class LogsOnTheWay(Regression):
    """Values are logged before, between and after the layers, and nothing else uses them."""

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        self.log("input", batch["x"].mean())
        x = self.embed(batch["x"])
        for i, layer in enumerate(self.layers):
            x = layer(x)
            self.log(f"layer_{i}", x.abs().mean(), on_epoch=True)
        loss = F.mse_loss(self.head(x), batch["y"])
        self.log_dict({"output": x.mean(), "train_loss": loss}, on_step=True, on_epoch=True)
        return loss


class UnusedOutputs(Regression):
    """Layers return tensors with a gradient path that nobody uses, or only a later layer does."""

    class Layer(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
            x = super().forward(x if scale is None else x * scale)
            return x, x.exp(), 2 * x.detach()

    depth = 5

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.embed(x), None
        for i, layer in enumerate(self.layers):
            x, new, _ = layer(x, scale if i == 3 else None)
            scale = new if i == 0 else scale
        return self.head(x)
