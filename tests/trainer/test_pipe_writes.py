"""With several pipes, what the step only sets in the LightningModule is what the last micro-batch has set."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CutError
from tests.support.pairs import pairs
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

WIDTH, SAMPLES, BATCH = 3, 16, 4
DATA = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).double()


class Model(L.LightningModule):
    """Sets attributes of its own before the layers and behind them, and adds to others."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.parts, self.read = parts, []
        self.gain, self.number, self.mean, self.text, self.steps, self.total = 1.0, 7, 0.0, "", 0, 0.0
        self.register_buffer("largest", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        number = batch_idx // self.parts
        self.gain = 0.5**number
        out = self.layers(batch[0]).pow(2).mean() * self.gain
        self.number, self.text = number, f"batch {number}"
        self.mean = float(batch[0].mean())  # of the micro-batch
        self.largest = batch[0].max()
        self.kind = "long" if batch[0].shape[1] > 2 else "short"
        self.steps += 1
        return out

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.parts == 0:
            self.read += [self.gain, self.number, self.mean, self.text, self.steps, self.kind]
            self.read.append(float(self.largest))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Config:
    """What the LightningModule refers to."""

    def __init__(self) -> None:
        self.scale, self.number, self.steps = 1.0, 0, 0


class SetsInside(Model):
    """Sets numbers in an object."""

    def __init__(self, parts: int) -> None:
        super().__init__(parts)
        self.config, self.table = Config(), {"number": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.sets(batch_idx // self.parts, float(batch[0].mean()))
        return super().training_step(batch, batch_idx)

    def sets(self, number: int, mean: float) -> None:
        self.config.scale = 0.5 + number


class SetsWholeNumbersInside(SetsInside):
    def sets(self, number: int, mean: float) -> None:
        self.config.number = number


class SetsInADictionary(SetsInside):
    def sets(self, number: int, mean: float) -> None:
        self.table["number"] = 3 * number


class MakesInADictionary(SetsInside):
    def sets(self, number: int, mean: float) -> None:
        self.table["scale"] = mean


class SumsInside(SetsInside):
    def sets(self, number: int, mean: float) -> None:
        self.config.scale += mean


class CountsInside(SetsInside):
    """Exact wherever it is counted."""

    def sets(self, number: int, mean: float) -> None:
        self.config.steps += 1
        self.config.scale += 0.1
        self.table["number"] += 2

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.parts == 0:
            self.read += [self.config.steps, round(self.config.scale, 9), self.table["number"]]


class Doubles(Model):
    def __init__(self, parts: int) -> None:
        super().__init__(parts)
        self.power = 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.power = 2 * self.power
        return super().training_step(batch, batch_idx)


class Averages(Model):
    """Keeps a moving average."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.total = 0.9 * self.total + 0.1 * float(batch[0].mean())
        return super().training_step(batch, batch_idx)


def trained(
    process: int, devices: int | None, model: type[Model], micro_batches: int, schedule: str = "chimera"
) -> tuple[list[Any], list[str]]:
    """What hooks read, and which attributes are warned of."""
    quiet()
    L.seed_everything(7, verbose=False)
    accumulated = 1 if devices else micro_batches
    module = model(accumulated).double()
    strategy: Any = "auto"
    if devices:
        strategy = PipeStrategy(layers="layers", micro_batches=micro_batches, schedule=schedule)
    settings = {**QUIET, "max_epochs": 1, "accumulate_grad_batches": accumulated}
    trainer = L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(TensorDataset(DATA), BATCH // accumulated))
    return module.read, [str(each.message) for each in caught if "by its own value" in str(each.message)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("micro_batches", "schedule"), [(2, "chimera"), (4, "chimera"), (4, "gems"), (4, "dualpipe"), (1, "chimera")]
)
def test_what_is_only_set_equals_one_device(micro_batches: int, schedule: str) -> None:
    plain, _ = trained(0, None, Model, micro_batches)
    options = {"devices": 2, "model": Model, "micro_batches": micro_batches, "schedule": schedule}
    for values, warned in run_trainers(trained, 2, timeout=40, **options):
        assert values == plain
        assert not warned


@pytest.mark.timeout(60)
def test_what_is_no_sum_is_warned_of() -> None:
    ended = run_trainers(trained, 2, timeout=40, devices=2, model=Averages, micro_batches=4)
    [warned] = [each for _, of_rank in ended for each in of_rank]
    assert "`self.total`" in warned
    assert "schedule='1f1b'" in warned


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("model", "name", "micro_batches"),
    pairs(
        [
            (SetsInside, r"config\.scale"),
            (SetsWholeNumbersInside, r"config\.number"),
            (SetsInADictionary, r"table\.number"),
            (MakesInADictionary, r"table\.scale"),
            (SumsInside, r"config\.scale"),
        ],
        [2, 4],
    ),
)
def test_numbers_inside_of_what_it_refers_to_are_refused(model: type[Model], name: str, micro_batches: int) -> None:
    with pytest.raises(CutError, match=rf"the step changes the number `self\.{name}`, and this schedule") as caught:
        run_trainers(trained, 2, timeout=40, devices=2, model=model, micro_batches=micro_batches)
    assert "attribute of the LightningModule" in str(caught.value.hint)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_what_is_counted_there_equals_one_device(micro_batches: int) -> None:
    plain, _ = trained(0, None, CountsInside, micro_batches)
    options = {"devices": 2, "model": CountsInside, "micro_batches": micro_batches}
    for values, _ in run_trainers(trained, 2, timeout=40, **options):
        assert values == pytest.approx(plain, rel=1e-9)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_whole_numbers_that_are_no_counters_are_warned_of(micro_batches: int) -> None:
    ended = run_trainers(trained, 2, timeout=40, devices=2, model=Doubles, micro_batches=micro_batches)
    warned = {each for _, of_rank in ended for each in of_rank}
    assert len(warned) == 1
    assert "`self.power`" in warned.pop()


class Counts(Model):
    """Counts what micro-batches have more or less of."""

    def __init__(self, parts: int) -> None:
        super().__init__(parts)
        self.large = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.large += int((batch[0] > 0.5).sum())
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.parts == 0:
            self.read.append(self.large)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_numbers_of_what_micro_batches_have_equal_one_device(micro_batches: int) -> None:
    plain, _ = trained(0, None, Counts, micro_batches)
    assert len({after - before for before, after in pairwise(plain)}) > 1
    for values, warned in run_trainers(trained, 2, timeout=40, devices=2, model=Counts, micro_batches=micro_batches):
        assert values == plain
        assert not warned


class Makes(Model):
    """Makes what it counts itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.made = getattr(self, "made", 0) + 1
        return super().training_step(batch, batch_idx)


class MakesOnce(Model):
    """Does not change it any more."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self, "made"):
            self.made = batch[0].shape[1]
        return super().training_step(batch, batch_idx) * self.made


@pytest.mark.timeout(60)
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_a_counter_that_each_pipe_would_begin_anew_is_refused(micro_batches: int) -> None:
    with pytest.raises(CutError, match=r"the step makes `self\.made` itself and then changes it") as caught:
        run_trainers(trained, 2, timeout=40, devices=2, model=Makes, micro_batches=micro_batches)
    assert "__init__" in str(caught.value.hint)


@pytest.mark.timeout(60)
def test_what_is_made_once_equals_one_device() -> None:
    plain, _ = trained(0, None, MakesOnce, 2)
    for values, warned in run_trainers(trained, 2, timeout=40, devices=2, model=MakesOnce, micro_batches=2):
        assert values == plain
        assert not warned


class Reads(nn.Module):
    """Computes with an attribute of its LightningModule.

    Args:
        owner: that.
    """

    def __init__(self, owner: Model) -> None:
        super().__init__()
        self.linear, self.owner = nn.Linear(WIDTH, WIDTH), [owner]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.linear(x)) * self.owner[0].total
        return out


class IsRead(Model):
    """A layer of the first stage, or of the last one, reads what the step changes.

    Args:
        parts: see `Model`.
    """

    reader = 0

    def __init__(self, parts: int) -> None:
        super().__init__(parts)
        self.total = 1.0
        self.layers[self.reader] = Reads(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = super().training_step(batch, batch_idx)
        self.total *= 0.9
        return out


class IsReadByTheLast(IsRead):
    reader = 3


class IsSetAndRead(IsRead):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.total = 0.9 ** (batch_idx // self.parts)
        return Model.training_step(self, batch, batch_idx)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("model", [IsRead, IsReadByTheLast])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_what_layers_read_of_it_is_refused(model: type[IsRead], micro_batches: int) -> None:
    with pytest.raises(CutError, match=rf"'layers\.{model.reader}' reads `self\.total` in its forward pass, which"):
        run_trainers(trained, 2, timeout=40, devices=2, model=model, micro_batches=micro_batches)


@pytest.mark.timeout(60)
def test_what_layers_read_of_what_is_only_set_equals_one_device() -> None:
    plain, _ = trained(0, None, IsSetAndRead, 2)
    for values, warned in run_trainers(trained, 2, timeout=40, devices=2, model=IsSetAndRead, micro_batches=2):
        assert values == plain
        assert not warned
