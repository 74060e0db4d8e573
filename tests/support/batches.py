"""Batches with the interfaces of libraries that are not installed here."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Graph:
    """One graph, as torch_geometric's ``Data``.

    Args:
        x: features of its nodes.
        y: its label.
    """

    def __init__(self, x: Tensor, y: int = 0) -> None:
        self.x, self.y = x, torch.tensor([y])


class GraphBatch(Graph):
    """Several graphs in one, as torch_geometric's ``Batch``: each node says of which graph it is."""

    batch: Tensor
    counts: list[int]

    @classmethod
    def from_data_list(cls, graphs: Sequence[Graph]) -> GraphBatch:
        """Put graphs together."""
        made = cls(torch.cat([graph.x for graph in graphs]))
        made.y = torch.cat([graph.y for graph in graphs])
        made.counts = [len(graph.x) for graph in graphs]
        made.batch = torch.arange(len(graphs)).repeat_interleave(torch.tensor(made.counts))
        return made

    def to_data_list(self) -> list[Graph]:
        """The graphs."""
        return [Graph(x, int(y)) for x, y in zip(self.x.split(self.counts), self.y, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """The attributes."""
        return dict(vars(self))

    def clone(self) -> GraphBatch:
        """A copy with tensors of its own."""
        return copy.deepcopy(self)


def graphs(nodes: Sequence[int], seed: int = 0) -> GraphBatch:
    """A batch of graphs with so many nodes."""
    generator = torch.Generator().manual_seed(seed)
    made = [Graph(torch.randn(n, 4, generator=generator, dtype=torch.float64), n % 3) for n in nodes]
    return GraphBatch.from_data_list(made)


class Rows(MutableMapping[str, Any]):
    """Tensors with a common first dimension, as tensordict's ``TensorDict``: setting others raises."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self.batch_size = torch.Size([len(next(iter(tensors.values())))])

    def __getitem__(self, key: str) -> Tensor:
        return self._tensors[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        if len(value) != self.batch_size[0]:
            raise RuntimeError(f"batch dimension mismatch, got {tuple(value.shape)}")
        self._tensors[key] = value

    def __delitem__(self, key: str) -> None:
        del self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return self.batch_size[0]

    def split(self, sizes: list[int]) -> tuple[Rows, ...]:
        """Parts along the first dimension."""
        parts = zip(*(tensor.split(sizes) for tensor in self._tensors.values()), strict=True)
        return tuple(Rows(dict(zip(self._tensors, part, strict=True))) for part in parts)

    def clone(self) -> Rows:
        """A copy with tensors of its own."""
        return Rows({name: tensor.clone() for name, tensor in self._tensors.items()})

    def to(self, *args: Any, **kwargs: Any) -> Rows:
        """The same on a device."""
        return Rows({name: tensor.to(*args, **kwargs) for name, tensor in self._tensors.items()})
