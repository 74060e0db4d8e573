"""What writers, loggers, checkpoints and limits see of evaluations is that of one device, for all placements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from tests.support import oracle, processes
from tests.support.evaluated_modules import SIZE, WIDTH, Evaluated, Rows, Steps, loader
from tests.support.pairs import asked, slow_but
from tests.support.trainer_runs import QUIET, quiet
from tests.trainer.evaluation.test_stream import schedule


class Trained(Evaluated):
    """Has a schedule of learning rates, and logs in training."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Endless(IterableDataset):
    """Counts the rows that it gives."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        rows = Rows()
        while True:
            self.given += 1
            yield rows[self.given % len(rows)]


def plain(value: Any) -> Any:
    """Lists and numbers in the place of tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


class Written(BasePredictionWriter):
    """Keeps all that it is given, in order."""

    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.calls: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *others: Any) -> None:
        self.calls.append(plain((prediction, indices, *others)))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.calls.append(plain((predictions, indices)))


def trainer_for(devices: int | None, name: str, callbacks: list[L.Callback], **options: Any) -> L.Trainer:
    from lightning_pipe import PipeStrategy

    quiet()
    strategy = PipeStrategy(layers="model", schedule=schedule(name), micro_batches=1) if devices else "auto"
    return L.Trainer(
        accelerator="cpu", devices=devices or 1, strategy=strategy, callbacks=callbacks, **{**QUIET, **options}
    )


def loops(process: int, devices: int | None, name: str, folder: Path, limits: Sequence[int]) -> dict[str, Any]:
    """What each loop has shown to those who look at it."""
    L.seed_everything(7, verbose=False)
    found: dict[str, Any] = {}
    for interval, kept in (("batch", False), ("batch_and_epoch", None)):
        writer = Written(interval)
        trainer = trainer_for(devices, name, [writer])
        returned = trainer.predict(Trained().double(), [loader(), loader(rows=9)], return_predictions=kept)
        found[interval] = (plain(returned), writer.calls)
    for limit in limits:
        for what in ("validate", "test", "predict"):
            data = Endless()
            word = what.replace("validate", "val")
            trainer = trainer_for(devices, name, [], **{f"limit_{word}_batches": limit})
            getattr(trainer, what)(Trained().double(), DataLoader(data, batch_size=SIZE))
            # only the first process loads
            found[what, limit] = data.given if process == 0 else limit * SIZE
    logger, saving = Steps(), ModelCheckpoint(folder, "{epoch}-{step}", "loss_epoch", save_top_k=2)
    stopping = EarlyStopping("loss_epoch", patience=1, min_delta=0.15)
    options = {"max_epochs": 4, "val_check_interval": 2, "num_sanity_val_steps": 2, "limit_val_batches": 5}
    trainer = trainer_for(
        devices,
        name,
        [saving, stopping, LearningRateMonitor("step")],
        logger=logger,
        **{**options, "enable_checkpointing": True},
    )
    module = Trained().double()
    trainer.fit(module, loader(rows=12), loader())
    best = trainer.validate(dataloaders=loader(), ckpt_path="best", verbose=False)
    found["fit"] = {
        "logged": logger.logged,
        "best": best,
        "stopped": stopping.stopped_epoch,
        "steps": trainer.global_step,
        "kept": {Path(path).name: float(score) for path, score in saving.best_k_models.items()},
        "metrics": oracle.numbers(trainer.callback_metrics),
        "called": plain(module(torch.ones(2, WIDTH, dtype=torch.float64))),
    }
    return found


def assert_equal(ours: Any, theirs: Any) -> None:
    """Numbers differ by rounding at most; order and everything else are the same."""
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        ours, theirs = list(ours.values()), list(theirs.values())
    if isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_equal(one, other)
    else:
        assert ours == (pytest.approx(theirs, rel=1e-9) if isinstance(theirs, float) else theirs)


class CountsBatches(Trained):
    """Computes with what it counts, but for the sanity check, which counts nothing."""

    counted = 0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        value = super().validation_step([batch[0] * (1 + self.counted), batch[1]], batch_idx)
        if not self.trainer.sanity_checking:
            self.counted += 1
        return value


def sanity(process: int, devices: int | None) -> dict[str, Any]:
    trainer = trainer_for(devices, "1f1b", [], max_epochs=1, num_sanity_val_steps=2)
    L.seed_everything(7, verbose=False)
    trainer.fit(CountsBatches().double(), loader(rows=12), loader())
    return oracle.numbers(trainer.callback_metrics)


FAST = "gems"
NAMES = [FAST, "1f1b", "chimera", "dualpipe", "dualpipev", "interleaved", "zero_bubble_v"]


def limits_of(name: str) -> Sequence[int]:
    """Of batches; in the fast test one between them."""
    return (3,) if name == FAST else (1, 7)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What two ranks have."""
    calls: dict[str, Any] = {"sanity": partial(sanity, devices=2)}
    for name in asked(request, "name"):
        options = {"devices": 2, "name": name, "folder": tmp_path_factory.mktemp(name), "limits": limits_of(name)}
        calls[name] = partial(loops, **options)
    return processes.in_turn(calls, 2)


@pytest.mark.feature("Callbacks", "BasePredictionWriter", "works")
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", slow_but(NAMES, FAST))
def test_loops_of_all_schedules_are_those_of_one_device(name: str, tmp_path: Path, found: dict[str, list[Any]]) -> None:
    limits = limits_of(name)
    expected = loops(0, None, name, tmp_path, limits)
    assert all(expected[what, limit] == limit * SIZE for limit in limits for what in ("validate", "test", "predict"))
    for each in found[name]:
        assert_equal(each, expected)


def test_a_sanity_check_does_not_show_what_validations_change(found: dict[str, list[Any]]) -> None:
    expected = sanity(0, None)
    for each in found["sanity"]:
        assert_equal(each, expected)
