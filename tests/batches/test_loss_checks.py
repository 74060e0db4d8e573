"""Samples that depend on each other in any stage are noticed in the first batches, others never."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from tests.engine.first_batch.test_trial_losses import fit
from tests.support.model_zoo import ZOO
from tests.support.pairs import pairs, slow_but

MESSAGE = "depends on which samples are together"
LENGTH, WIDTH, CLASSES = 6, 4, 3


class Mixing(L.LightningModule):
    """Has its samples, or its time, along the first dimension; the last stage keeps them apart."""

    at = 1

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent = nn.GRU(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.to(dtype)

    def before(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"]

    def between(self, x: Tensor) -> Tensor:
        return x

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.before(batch)
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(self.between(x) if number == self.at else x))
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["y"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TimeBeforeSamples(Mixing):
    """As ``nn.GRU`` has it by default, with as many steps as samples."""

    def before(self, batch: dict[str, Tensor]) -> Tensor:
        return self.recurrent(batch["x"])[0]  # type: ignore[no-any-return]


class Centred(Mixing):
    """Takes the mean over the samples away, between layers of the first stage."""

    def between(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Neighbours(Mixing):
    """Mixes each sample with the next one."""

    def before(self, batch: dict[str, Tensor]) -> Tensor:
        return 0.5 * batch["x"] + 0.5 * batch["x"].roll(1, 0)


def batch(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(LENGTH, LENGTH, WIDTH, generator=generator, dtype=dtype)
    return {"x": x, "y": torch.randint(CLASSES, (LENGTH, LENGTH), generator=generator)}


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "four-stages": {"stages": 4, "schedule": "gpipe", "recompute": "always"},
    "weighted": {"loss_weight": lambda part: 2.0},
    "no-flush": {"micro_batches": 2, "stages": 2, "schedule": "pipedream_2bw"},
    "six-micro-batches": {"micro_batches": 6},
}


@pytest.mark.parametrize(
    ("module", "name"),
    pairs(
        [TimeBeforeSamples, Centred, Neighbours], list(OPTIONS), lambda module, name: name % 3 == module and name < 4
    ),
)
def test_samples_that_depend_on_each_other_are_told_once(module: type[Mixing], name: str) -> None:
    options = OPTIONS[name]
    if module is Centred and options.get("stages") == 4:
        options = {**options, "stages": 2}
    dtype = torch.float32 if name == "default" else torch.float64
    (told,) = fit(module(dtype), [batch(dtype)] * 2, layers="layers", message=MESSAGE, **options)
    assert "split_batch" in told


class Slight(Mixing):
    """Adds a little of the mean over the samples."""

    share = 1e-4

    def between(self, x: Tensor) -> Tensor:
        return x + self.share * x.mean(0)


class Views(Slight):
    """... of both views of the samples, which follow each other."""

    def before(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.cat([batch["x"], batch["x"].flip(-1)])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step({**batch, "y": batch["y"].repeat(2, 1)}, batch_idx)


class Late(Centred):
    """Does so in its fourth batch."""

    late = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.late = batch_idx >= 3
        return super().training_step(batch, batch_idx)

    def between(self, x: Tensor) -> Tensor:
        return super().between(x) if self.late else x


class Undefined(Mixing):
    """Divides by the deviation over the samples, which one sample has not."""

    def between(self, x: Tensor) -> Tensor:
        return x / (1.0 + x.std(0))


def test_what_is_not_finite_for_one_sample_is_told() -> None:
    assert len(fit(Undefined(), [batch()], layers="layers", message=MESSAGE, micro_batches=6)) == 1


@pytest.mark.parametrize(
    ("module", "dtype"),
    pairs(
        [Slight, Late, Views], [torch.float32, torch.float64], lambda module, dtype: module == dtype + 1 or module > 1
    ),
)  # the first: below
def test_what_is_little_or_late_is_told(module: type[Mixing], dtype: torch.dtype) -> None:
    assert len(fit(module(dtype), [batch(dtype)] * (4 if module is Late else 1), layers="layers", message=MESSAGE)) == 1


class SlightAtLast(Slight):
    """... in the last stage, where its loss alone shows it."""

    at, share = 3, 1e-2


def test_losses_in_single_precision_are_looked_at_as_closely() -> None:
    batches = [batch(torch.float32)] * 4
    for module, times in ((Mixing, 0), (SlightAtLast, 1)):
        assert len(fit(module(torch.float32), batches, layers="layers", message="mean over")) == times


def test_what_is_advised_works() -> None:
    options: dict[str, Any] = {
        "split_batch": lambda batch, m: [{k: v[:, i::m] for k, v in batch.items()} for i in range(m)],
        "loss_weight": lambda part: part["y"].shape[1],
    }
    assert fit(TimeBeforeSamples(), [batch()], layers="layers", message="samples", **options) == []
    assert fit(Centred(), [batch()], layers="layers", message=MESSAGE, micro_batches=1) == []


class Noise(Mixing):
    """Is random outside layers, whether it trains or not."""

    def before(self, batch: dict[str, Tensor]) -> Tensor:
        return F.dropout(batch["x"], 0.5) + torch.randn_like(batch["x"])


class Seldom(Mixing):
    """Leaves a layer of the first stage out at random."""

    def before(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"] * (torch.rand(()) < 0.1)


class Statistics(Mixing):
    """Keeps means over the samples for later, which are no samples."""

    def between(self, x: Tensor) -> Tensor:
        self.mean = x.mean()
        return x

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.0 * self.mean


class Copies(Views):
    """Gives the layers each sample twice, for two draws of dropout."""

    share = 0.0

    def before(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.cat([batch["x"], batch["x"]])


@pytest.mark.parametrize(
    ("module", "dtype"),
    pairs(
        [Mixing, Noise, Seldom, Statistics, Copies],
        [torch.float64, torch.float32],
        lambda module, dtype: module == 2 - dtype or (module == 4 and dtype == 0),
    ),
)
def test_no_false_alarms(module: type[Mixing], dtype: torch.dtype) -> None:
    for micro_batches in (2, 6):
        options = {"layers": "layers", "message": MESSAGE, "micro_batches": micro_batches}
        assert fit(module(dtype), [batch(dtype)] * 2, **options) == []


@pytest.mark.parametrize("name", slow_but(["mlp", "gpt2", "bert", "llama", "t5"], "gpt2"))
def test_no_false_alarms_with_real_models(name: str) -> None:
    entry = ZOO[name]
    batches = [_single(each) for each in entry.batches(1)]
    assert fit(entry.build().float(), batches, layers=entry.layers, message="samples") == []


def _single(batch: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
    )


class PackedSteps(L.LightningModule):
    """Its batches are packed sequences, whose rows lie by step; the recurrent layers keep the samples apart."""

    centred = False

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), *(nn.LSTM(WIDTH, WIDTH) for _ in range(3))])
        self.head = nn.Linear(WIDTH, 1)
        self.to(dtype)

    def training_step(self, batch: tuple[PackedSequence, Tensor], batch_idx: int) -> Tensor:
        packed, target = batch
        rows = self.layers[0](packed.data)
        packed = packed._replace(data=rows - rows.mean(0) if self.centred else rows)
        for layer in self.layers[1:]:
            packed, _ = layer(packed)
        return F.mse_loss(self.head(pad_packed_sequence(packed)[0].sum(0)), target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CentredSteps(PackedSteps):
    """Takes away the mean over the rows of all samples."""

    centred = True


def packed_batch(in_order: bool) -> tuple[PackedSequence, Tensor]:
    random = torch.Generator().manual_seed(2)
    lengths = [7, 6, 5, 4, 4, 3, 2, 1] if in_order else [3, 7, 1, 5, 4, 2, 6, 4]
    sequences = [torch.randn(length, WIDTH, generator=random, dtype=torch.float64) for length in lengths]
    return pack_sequence(sequences, enforce_sorted=in_order), torch.randn(8, 1, generator=random, dtype=torch.float64)


@pytest.mark.parametrize(("stages", "in_order"), pairs([2, 4], [True, False], lambda stages, order: stages < order))
def test_rows_of_packed_sequences_are_compared_where_they_lie(stages: int, in_order: bool) -> None:
    data = [packed_batch(in_order)] * 2
    assert fit(PackedSteps(), data, stages=stages, message="sample") == []
    assert fit(CentredSteps(), data, stages=stages, message=MESSAGE)
