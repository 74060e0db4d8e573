"""Batches that are cut by functions of their own train as on one device; those that cannot be cut name the remedy."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import ConfigurationError
from tests.support import oracle
from tests.support.batches import Graph, GraphBatch, Rows, graphs
from tests.support.pairs import slow_but
from tests.support.processes import run_trainers
from tests.support.trainer_runs import quiet

LENGTHS = [3, 5, 4, 6, 3, 2]


@dataclass
class Fields:
    x: Tensor
    scale: InitVar[float]
    y: Tensor = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.y = torch.arange(len(self.x)) % 3
        self.half = self.x * scale


def features(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def packed(seed: int) -> Any:
    sequences = [features(seed + 100 * n, length, 4) for n, length in enumerate(LENGTHS)]
    return pack_sequence(sequences, enforce_sorted=False), torch.arange(len(sequences)) % 3


BATCHES: dict[str, Any] = {
    "graphs": partial(graphs, LENGTHS),
    "rows": lambda seed: Rows({"x": features(seed, 6, 4), "y": torch.arange(6) % 3}),
    "dataclass": lambda seed: Fields(features(seed, 6, 4), 0.5),
    "packed": packed,
}


class Net(L.LightningModule):
    """Takes batches of every kind, and changes them in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)).double()
        self.head = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, Graph):
            batch.x.mul_(2)
            x = self(batch.x)
            if isinstance(batch, GraphBatch):
                x = torch.stack([x[batch.batch == number].mean(0) for number in range(len(batch.counts))])
            else:
                x = x.mean(0, keepdim=True)
            return F.cross_entropy(self.head(x), batch.y)
        if isinstance(batch, Rows):
            batch["x"] = batch["x"] * 2
            return F.cross_entropy(self.head(self(batch["x"])), batch["y"])
        if isinstance(batch, Fields):
            return F.cross_entropy(self.head(self(batch.x + batch.half)), batch.y)
        padded, lengths = pad_packed_sequence(batch[0], batch_first=True)
        last = self(padded)[torch.arange(len(lengths)), lengths - 1]
        return F.cross_entropy(self.head(last), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(process: int, names: list[str], **options: Any) -> list[oracle.Trace]:
    quiet()
    traces = []
    for name in names:
        strategy = PipeStrategy(layers="layers", micro_batches=3, **options)
        made = [BATCHES[name](seed) for seed in range(2)]
        traces.append(oracle.fit(Net(), made, clip=None, strategy=strategy, devices=2))  # type: ignore[arg-type]
    return traces


@pytest.mark.feature(
    "Data loaders",
    "batches of graphs, packed sequences, TensorDict, dataclasses with fields that the constructor does not take",
    "works",
    "cut by themselves, or by `register_batch`",
)
@pytest.mark.parametrize("schedule", slow_but(["1f1b", "interleaved"], "1f1b"))
def test_batches_that_cut_themselves(schedule: str) -> None:
    names = list(BATCHES)
    found = run_trainers(trained, 2, names=names, schedule=schedule)[0]
    for name, trace in zip(names, found, strict=True):
        plain = oracle.fit(Net(), [BATCHES[name](seed) for seed in range(2)], clip=None)  # type: ignore[arg-type]
        oracle.assert_equal(trace, plain)


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        size = len(batch.counts) if isinstance(batch, GraphBatch) else len(batch)
        self.log("loss", self.training_step(batch, batch_idx), batch_size=size)


@pytest.mark.parametrize("name", ["graphs", "rows"])
def test_evaluations_cut_them_too(name: str) -> None:
    def fit(strategy: Any) -> oracle.Trace:
        made, more = ([BATCHES[name](seed) for seed in seeds] for seeds in ((0, 1), (2, 3)))
        options = {"validation": more, "strategy": strategy, "num_sanity_val_steps": 0}
        return oracle.fit(Validated(), made, clip=None, **options)  # type: ignore[arg-type]

    oracle.assert_equal(fit(PipeStrategy(layers="layers", stages=2, evaluation_micro_batches=2)), fit("auto"))


class Printing(Net):
    printed = ""

    def print(self, *args: Any, **kwargs: Any) -> None:
        self.printed += " ".join(map(str, args))


def one_graph(seed: int) -> Graph:
    return Graph(features(seed, 6, 4), seed % 3)


def fit_graph(module: Net, **options: Any) -> oracle.Trace:
    strategy = PipeStrategy(layers="layers", stages=2, **options)
    made = [one_graph(seed) for seed in range(3)]
    return oracle.fit(module, made, clip=None, strategy=strategy)  # type: ignore[arg-type]


def test_a_batch_that_cannot_be_cut_names_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)a Graph.*micro_batches=1.*exact.*split_batch.*loss_weight"):
        fit_graph(Net(), micro_batches=2)
    plain = oracle.fit(Net(), [one_graph(seed) for seed in range(3)], clip=None)  # type: ignore[arg-type]
    oracle.assert_equal(fit_graph(Net(), micro_batches=1), plain)  # its two stages do not see each other's changes


def test_auto_leaves_it_whole_and_says_so() -> None:
    module = Printing()
    oracle.assert_equal(fit_graph(module), oracle.fit(Net(), [one_graph(seed) for seed in range(3)], clip=None))  # type: ignore[arg-type]
    assert "So it runs whole, with micro_batches=1" in " ".join(module.printed.split())
