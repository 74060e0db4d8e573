"""What a step takes from iterators and generators of its own is what it takes on one device, or an error."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CutError
from lightning_pipe.plain.own_sources import untouched
from tests.support import oracle
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

DATA = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).double()
WORDS = r"an iterator of its own, 'self\.items'(.|\n)*on_train_batch_start"
OTHERS = "is given other values here than on the stage before"


class Takes(L.LightningModule):
    """Scales with items of an iterator: before the layers ("front"), behind them, or in both places."""

    def __init__(self, places: Sequence[str], passes: int = 1) -> None:
        super().__init__()
        self.places, self.passes = places, passes
        self.items = (1.0 + 0.1 * number for number in range(1000))
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def _item(self, place: str) -> float:
        return next(self.items) if place in self.places else 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = batch[0] * self._item("front")
        for _ in range(self.passes):
            h = self.layers(h)
        return h.mean() * self._item("behind")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(
    process: int,
    devices: int | None,
    places: Sequence[str],
    *,
    passes: int = 1,
    **options: Any,
) -> dict[str, Tensor]:
    """The weights after a training."""
    quiet()
    L.seed_everything(7, verbose=False)
    module = Takes(places, passes).double()
    strategy: Any = "auto"
    if devices:
        strategy = PipeStrategy(layers="layers", **{"micro_batches": 1, **options}, passes=passes)
    trainer = L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, max_epochs=1, **QUIET)
    trainer.fit(module, DataLoader(TensorDataset(DATA), 4))
    return oracle.state_of(module)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", ["front", "behind"])
def test_one_run_of_each_stage_takes_what_one_device_takes(place: str) -> None:
    plain = trained(0, None, [place])
    for weights in run_trainers(trained, 2, timeout=40, devices=2, places=[place]):
        for name, value in plain.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.timeout(60)
def test_pipes_that_see_a_part_of_the_micro_batches_are_refused() -> None:
    with pytest.raises(Exception, match=WORDS):
        run_trainers(trained, 2, timeout=40, devices=2, places=["behind"], micro_batches=4, schedule="gems")


def test_two_stages_of_a_rank_take_other_items() -> None:
    with pytest.raises(CutError, match=OTHERS):
        trained(0, 1, ["front"], stages=2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("options", [{"passes": 2}, {"schedule": "pipedream"}], ids=str)
def test_what_is_taken_behind_the_cut_too_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=OTHERS):
        run_trainers(trained, 2, timeout=40, devices=2, places=["front", "behind"], **options)


def taking_nothing(module: nn.Module) -> AbstractContextManager[None]:
    return untouched({"": module})


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.torchs, self.pythons, self.news = torch.Generator(), random.Random(1), np.random.default_rng(1)
        self.olds, self.items, self.unused = np.random.RandomState(1), iter(range(10)), iter(range(10))
        self.inside = {"first": iter(range(10))}


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("torchs", lambda module: torch.rand((), generator=module.torchs)),
        ("pythons", lambda module: module.pythons.random()),
        ("news", lambda module: module.news.random()),
        ("olds", lambda module: module.olds.rand()),
        ("items", lambda module: next(module.items)),
        ("inside['first']", lambda module: next(module.inside["first"])),
    ],
)
def test_all_that_a_run_takes_from_is_known(name: str, draw: Callable[[Any], Any]) -> None:
    module = Holds()
    items = module.items
    with taking_nothing(module):
        pass
    with (
        pytest.raises(CutError, match=re.escape(f"self.{name}")),
        taking_nothing(module),
    ):
        draw(module)
    assert module.items is items


def test_an_error_of_the_step_comes_first() -> None:
    def fails(module: Holds) -> None:
        next(module.items)
        raise ValueError("the reason")

    module = Holds()
    with pytest.raises(ValueError, match="the reason"), taking_nothing(module):
        fails(module)
