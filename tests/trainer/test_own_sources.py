"""What a step takes from iterators and generators of its own is what it takes on one device, or an error."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.module_state import Tracked
from lightning_pipe.trainer.own_sources import SourcesOfRun
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

DATA = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).double()


class Takes(L.LightningModule):
    """Scales with items of an iterator: before the layers ("front"), behind them, or in both places."""

    def __init__(self, places: Sequence[str], passes: int = 1, within: str = "") -> None:
        super().__init__()
        self.places, self.passes, self.within = places, passes, within
        items = (1.0 + 0.1 * number for number in range(1000))
        self.items: Any = {"": items, "list": [items], "dict": {"first": items}}[within]
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def _item(self, place: str) -> float:
        items = self.items[{"list": 0, "dict": "first"}[self.within]] if self.within else self.items
        return next(items) if place in self.places else 1.0

    def step(self, x: Tensor) -> Tensor:
        h = x * self._item("front")
        for _ in range(self.passes):
            h = self.layers(h)
        return h.mean() * self._item("behind")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.step(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def found(
    process: int, devices: int | None, places: Sequence[str], *, passes: int = 1, within: str = "", **options: Any
) -> float:
    """What is evaluated after a training."""
    quiet()
    L.seed_everything(7, verbose=False)
    module = Takes(places, passes, within).double()
    parts = options.setdefault("micro_batches", 1)

    def trainer(**settings: Any) -> L.Trainer:
        strategy: Any = PipeStrategy(layers="layers", **options) if devices else "auto"
        settings = {**QUIET, **settings, "max_epochs": 1}
        return L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, **settings)

    def loader(parts: int) -> Any:
        return DataLoader(TensorDataset(DATA), 4 // parts)

    if passes == 1:  # else in the evaluation alone
        accumulates = 1 if devices else parts
        trainer(limit_val_batches=0, accumulate_grad_batches=accumulates).fit(module, loader(accumulates))
    evaluates = trainer()
    evaluates.validate(module, loader(1), verbose=False)
    return float(evaluates.callback_metrics["value"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("places", "options"),
    [
        (("front",), {"micro_batches": 2}),
        (("front",), {"micro_batches": 1}),
        (("behind",), {"micro_batches": 2}),
        (("front",), {"micro_batches": 1, "within": "dict"}),
        (("behind",), {"micro_batches": 2, "within": "list"}),
    ],
)
def test_one_run_of_each_stage_takes_what_one_device_takes(places: Sequence[str], options: dict[str, Any]) -> None:
    plain = found(0, None, places, **options)
    for value in run_trainers(found, 2, timeout=40, devices=2, places=places, **options):
        assert value == pytest.approx(plain, rel=1e-9)


@pytest.mark.parametrize("within", ["", "list", "dict"])
def test_trial_runs_put_items_back(within: str) -> None:
    """The first batch's loss is compared with that of two micro-batches together."""
    options: dict[str, Any] = {"micro_batches": 2, "within": within}
    plain = found(0, None, ["front", "behind"], **options)
    assert found(0, 1, ["front", "behind"], stages=1, **options) == pytest.approx(plain, rel=1e-9)


WORDS = r"an iterator of its own, 'self\.items(\[(0|'first')\])?'"
OTHERS = "is given other values here than on the stage before"


def hint_of(error: BaseException) -> str:
    return str(error).partition("on_train_batch_start.")[2].partition("\n")[0]


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"within": "list"}, {"within": "dict"}], ids=str)
def test_two_stages_of_a_rank_take_other_items(options: dict[str, Any]) -> None:
    with pytest.raises(CutError, match=OTHERS):
        found(0, 1, ["front"], **{"stages": 2, **options})


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("options", "remedy"),
    [({"recompute": "always", "micro_batches": 2}, " Or use recompute='never'."), ({"passes": 2}, "")],
    ids=str,
)
def test_runs_that_come_again_are_refused(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(Exception, match=WORDS) as refused:
        run_trainers(found, 2, timeout=40, devices=2, places=["front"], **options)
    assert hint_of(refused.value) == remedy


def training(process: int, places: Sequence[str], passes: int = 1, **options: Any) -> None:
    quiet()
    strategy = PipeStrategy(layers="layers", passes=passes, **{"micro_batches": 1, **options})
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, limit_val_batches=0, **QUIET)
    trainer.fit(Takes(places, passes).double(), DataLoader(TensorDataset(DATA), 4))


@pytest.mark.timeout(60)
def test_passes_of_a_rank_take_other_items() -> None:
    with pytest.raises(Exception, match=OTHERS):
        run_trainers(training, 2, timeout=40, places=["front"], passes=2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("schedule", ["chimera", "gems", "dualpipe"])
@pytest.mark.parametrize("place", ["front", "behind"])
def test_several_pipes_that_complete_steps_are_refused(schedule: str, place: str) -> None:
    """Each has items of its own, and sees a part of the micro-batches."""
    with pytest.raises(Exception, match=WORDS) as refused:
        run_trainers(training, 2, timeout=40, places=[place], micro_batches=4, schedule=schedule)
    assert hint_of(refused.value) == " Or use a schedule with one pipe, such as 1f1b."


@pytest.mark.timeout(60)
def test_what_is_taken_in_several_places_is_refused_by_asynchronous_schedules() -> None:
    with pytest.raises(Exception, match=OTHERS):
        run_trainers(training, 2, timeout=40, places=["front", "behind"], schedule="pipedream")


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.torchs, self.pythons, self.news = torch.Generator(), random.Random(1), np.random.default_rng(1)
        self.olds, self.items, self.unused = np.random.RandomState(1), iter(range(10)), iter(range(10))

    def draw(self) -> list[Any]:
        drawn = [torch.rand((), generator=self.torchs), self.pythons.random(), self.news.random(), self.olds.rand()]
        return [float(each) for each in drawn] + [next(self.items)]


def test_everything_that_was_taken_is_known_and_put_back() -> None:
    module = Holds()
    items = module.items
    assert SourcesOfRun(Tracked(module, [])).end() == set()
    assert module.items is items
    run = SourcesOfRun(Tracked(module, []))
    first = module.draw()
    assert run.end() == {"items", "news", "olds", "pythons", "torchs"}
    assert module.items is items
    run.put_back()
    assert module.draw() == first
    assert module.draw() != first


@pytest.mark.timeout(60)
def test_what_is_taken_behind_the_cut_too_is_refused() -> None:
    with pytest.raises(Exception, match=OTHERS):
        run_trainers(found, 2, timeout=40, devices=2, places=["front", "behind"])
