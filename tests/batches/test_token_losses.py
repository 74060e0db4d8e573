"""Losses that are means over tokens equal one device with the whole batch, however the tokens are spread."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.transport.base import Transport
from tests.support.pairs import pairs, slow_but
from tests.support.processes import in_turn, run_trainers
from tests.support.trainer_runs import QUIET

VOCABULARY, WIDTH, LENGTH = 11, 6, 5


class Tagger(L.LightningModule):
    """Predicts a class for every token.

    Args:
        loss: of logits and labels.
    """

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.loss = loss
        self.losses: list[float] = []
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.sizes.append(len(batch["labels"]))
        x = self.embed(batch["input_ids"])
        for layer in self.layers:
            x = layer(x)
        loss = self.loss(self.head(x), batch["labels"])
        self.log("loss", loss, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    """Over all tokens that are labelled."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    """The same by hand: without labels its gradients are 0 / 0, too."""
    losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return (losses * (labels != -100)).sum() / (labels != -100).sum()


def causal(logits: Tensor, labels: Tensor) -> Tensor:
    """Each token predicts the next one."""
    return mean(logits[:, :-1], labels[:, 1:])


def of_samples(logits: Tensor, labels: Tensor) -> Tensor:
    """Labels do not count."""
    return F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0))


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    """Classes count differently."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=torch.arange(VOCABULARY).double())


def rare(logits: Tensor, labels: Tensor) -> Tensor:
    """Over some labels alone, of which a micro-batch may have none."""
    return mean(logits, labels.masked_fill(labels <= 5, -100))


def tokens(micro_batch: Any) -> Tensor:
    """What a micro-batch counts."""
    return (micro_batch["labels"] != -100).sum()


def items(batches: int, unlabelled: tuple[int, ...] = (), *, size: int = 8) -> list[dict[str, Tensor]]:
    """Samples with padding, some of every batch without any label."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (batches * size, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (len(ids), 1), generator=generator)
    lengths[[place % size in unlabelled for place in range(len(ids))]] = 0
    labels = ids.masked_fill(torch.arange(LENGTH) >= lengths, -100)
    return [{"input_ids": one, "labels": other} for one, other in zip(ids, labels, strict=True)]


def fit(process: int, module: Tagger, data: Any, replicas: int = 1, devices: int = 1, strategy: Any = "auto") -> Any:
    """Batches of eight samples, of which each replica has its part."""
    options = {"devices": devices, "strategy": strategy, "max_epochs": 1, "use_distributed_sampler": False}
    trainer = L.Trainer(accelerator="cpu", **options, **QUIET)
    trainer.fit(module.double(), DataLoader(data[process % replicas :: replicas], 8 // replicas))
    state = {name: value.tolist() for name, value in module.state_dict().items()}
    return {**state, "losses": module.losses, "epoch": float(trainer.callback_metrics["loss_epoch"])}


def assert_equal(found: Any, expected: Any, without: tuple[str, ...] = ()) -> None:
    assert found.keys() == expected.keys()
    for name in found.keys() - {*without}:
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(expected[name]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("loss", "schedule"), pairs([mean, masked], ["1f1b", "zero_bubble"], lambda loss, schedule: loss == schedule)
)
def test_what_counts_nothing_has_no_gradients(loss: Any, schedule: str) -> None:
    data = items(3, unlabelled=(2, 3))
    strategy = PipeStrategy(stages=2, layers="layers", micro_batches=4, loss_weight=tokens, schedule=schedule)
    assert_equal(fit(0, Tagger(loss), data, strategy=strategy), fit(0, Tagger(loss), data))


LOSSES = [mean, masked, causal, of_samples]


@pytest.mark.parametrize(
    ("loss", "micro_batches"),  # the other losses: also on two processes, below
    pairs(LOSSES, [3, "auto"], lambda loss, micro_batches: loss == 0 or (loss, micro_batches) == (3, 0)),
)
def test_means_over_labels_need_no_function(loss: Any, micro_batches: Any) -> None:
    module, data = Tagger(loss), items(4, unlabelled=() if loss is causal else (6, 7))
    found = fit(0, module, data, strategy=PipeStrategy(stages=2, layers="layers", micro_batches=micro_batches))
    assert_equal(found, fit(0, Tagger(loss), data))
    assert max(module.sizes) < 8  # no batch has run whole


TOGETHER = [(causal, 1), (masked, 2)]
"""Losses with numbers of replicas."""


def some(of_replicas: bool) -> list[dict[str, Tensor]]:
    """Of the last, a whole replica has no labels."""
    return items(4, unlabelled=(1, 3, 5, 7) if of_replicas else (1, 3, 5))


def of_two_processes(process: int) -> list[tuple[Any, int]]:
    """What each of them finds, and in how many batches replicas ask what losses are a mean over."""
    found, asked = [], [0]
    ask = Transport.sum_over_replicas

    def counted(self: Transport, *amounts: float) -> list[float]:
        asked[0] += sys._getframe(1).f_code.co_name == "due"
        return ask(self, *amounts)

    def add(loss: Any, replicas: int, data: Any, **more: Any) -> None:
        asked[0] = 0
        options = {"stages": 2, "layers": "layers", "micro_batches": 4 // replicas, "data_parallel_size": replicas}
        module, strategy = Tagger(loss), PipeStrategy(**options, **more)
        found.append((fit(process, module, data, replicas=replicas, devices=2, strategy=strategy), asked[0]))

    with patch.object(Transport, "sum_over_replicas", counted):
        for loss, replicas in TOGETHER:
            add(loss, replicas, some(False))
        add(masked, 2, some(True), loss_weight=tokens)
    return found


def test_ranks_and_replicas_agree_and_replicas_may_have_no_labels() -> None:
    """Looks at the first batches show what losses are a mean over, and replicas need not ask each other."""
    runs = [(loss, replicas, some(False)) for loss, replicas in TOGETHER] + [(masked, 2, some(True))]
    expected = [fit(0, Tagger(loss), data) for loss, _, data in runs]
    for of_process in run_trainers(of_two_processes, 2):
        for (_, replicas, _), (found, _), truth in zip(runs, of_process, expected, strict=True):
            # each replica has losses of its own
            assert_equal(found, truth, without=("losses", "epoch") if replicas > 1 else ())
        assert of_process[1][1] == 0


EVEN = [((3, 4), 1), ((3, 4), 2), ((4, 4), 2)]
"""Numbers of labels of each replica's samples, and of micro-batches."""


def even(process: int, lengths: tuple[int, ...], micro_batches: int) -> Any:
    """Two replicas whose micro-batches have as many labels as each other, and as the other's or not."""
    data = items(2)
    for place, item in enumerate(data):
        item["labels"] = item["input_ids"].masked_fill(torch.arange(LENGTH) >= lengths[place % 2], -100)
    options = {"stages": 1, "data_parallel_size": 2, "micro_batches": micro_batches}
    found = []
    for weight in (None, tokens):
        strategy = PipeStrategy(**options, loss_weight=weight)
        try:
            found.append(fit(process, Tagger(mean), data, replicas=2, devices=2, strategy=strategy))
        except ConfigurationError as error:
            found.append(str(error))
    return found, fit(0, Tagger(mean), data)


def test_replicas_with_other_numbers_of_labels_are_an_error_where_losses_do_not_show_what_counts() -> None:
    """The remedy works."""
    runs = {(lengths, number): partial(even, lengths=lengths, micro_batches=number) for lengths, number in EVEN}
    for (lengths, _), of_processes in in_turn(runs, 2).items():
        for (plain, weighted), truth in of_processes:
            assert_equal(weighted, truth, without=("losses", "epoch"))
            if lengths[0] == lengths[1]:
                assert_equal(plain, truth, without=("losses", "epoch"))
            else:
                assert "loss_weight=lambda" in plain


@pytest.mark.parametrize("loss", slow_but([mean, causal, of_samples], mean))
def test_what_losses_do_not_show_runs_whole(loss: Any) -> None:
    """All losses of the first batch are the same, since the head gives zeros; its gradients are not."""
    modules = [Tagger(loss), Tagger(loss)]
    for module in modules:
        nn.init.zeros_(module.head.weight)
        nn.init.zeros_(module.head.bias)
    data, strategy = items(3), PipeStrategy(stages=2, layers="layers", micro_batches=4)
    with pytest.warns(UserWarning, match="does not show in the losses") as told:
        found = fit(0, modules[0], data, strategy=strategy)
    assert_equal(found, fit(0, modules[1], data))
    assert modules[0].sizes == [8] + [2] * 8
    assert sum("does not show" in str(each.message) for each in told) == 1


@pytest.mark.parametrize("loss", slow_but([weighted, rare], rare))
def test_other_means_run_whole_or_name_the_remedy(loss: Any) -> None:
    data = items(3, unlabelled=(0, 1))
    strategy = PipeStrategy(stages=2, layers="layers")
    assert_equal(fit(0, Tagger(loss), data, strategy=strategy), fit(0, Tagger(loss), data))
    with pytest.raises(
        ConfigurationError, match=r"nor over labels that are not -100.*\n.*loss_weight.*micro_batches=1"
    ):
        fit(0, Tagger(loss), data, strategy=PipeStrategy(stages=2, layers="layers", micro_batches=4))


def test_the_remedy_of_other_means_works() -> None:
    def counted(micro_batch: Any) -> Tensor:
        return (micro_batch["labels"] > 5).sum()

    data = items(3, unlabelled=(0, 1))
    strategy = PipeStrategy(stages=2, layers="layers", micro_batches=4, loss_weight=counted)
    assert_equal(fit(0, Tagger(rare), data, strategy=strategy), fit(0, Tagger(rare), data))
