"""What the cases of all kinds share: the LightningModule that users write around a network, and synthetic data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_collate

STEPS, BATCH = 8, 16


@dataclass
class Case:
    """A LightningModule and what it trains on.

    Args:
        module: without dropout and other noise, since a pipeline draws other numbers than one device.
        loader: of eight batches, not shuffled.
        validated: whether a batch is validated, since the learning rate follows that loss.
    """

    module: L.LightningModule
    loader: Iterable[Any]
    validated: bool = False


def single(make: Callable[[], Case]) -> Callable[[], Case]:
    """Marks a module that makes tensors of type float32 itself; all others train in float64."""
    make.dtype = torch.float32  # type: ignore[attr-defined]
    return make


class Wrapped(L.LightningModule):
    """A network with its loss and AdamW."""

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Any], Tensor], lr: float = 1e-3) -> None:
        super().__init__()
        self.net, self.loss, self.lr = net, loss, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.net, batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-6)


def classified(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of a classifier's or a segmenting network's logits."""
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def own_loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that models of Transformers compute themselves."""
    return net(**batch).loss


def samples(
    make: Callable[[], Any], collate: Callable[[list[Any]], Any] = default_collate, size: int = BATCH
) -> DataLoader:
    """Batches of samples that a function draws one by one."""
    return DataLoader([make() for _ in range(STEPS * size)], batch_size=size, collate_fn=collate)


def typed(batch: Any) -> Any:
    """A batch with its floating-point numbers in the type of the module."""
    kind = torch.get_default_dtype()
    return tree_map(
        lambda leaf: leaf.to(kind) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
    )


def quiet(module: nn.Module) -> nn.Module:
    """The module without dropout, where its constructor has no argument for that."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        if isinstance(part, nn.RNNBase | nn.MultiheadAttention):
            part.dropout = 0.0
    return module


def image(size: int, channels: int = 3) -> Tensor:
    return torch.randn(channels, size, size)


def label(classes: int, *shape: int) -> Tensor:
    return torch.randint(classes, shape)


class Slices(torch.utils.data.IterableDataset):
    """The micro-batches of each batch, one after the other: what a Trainer accumulates over as many slices sees."""

    def __init__(self, loader: Iterable[Any], count: int) -> None:
        self.loader, self.count = loader, count

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            leaves, shape = tree_flatten(batch)
            parts = [leaf.chunk(self.count) if isinstance(leaf, Tensor) else [leaf] * self.count for leaf in leaves]
            yield from (tree_unflatten(list(slices), shape) for slices in zip(*parts, strict=True))
