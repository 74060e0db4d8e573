"""Evaluations whose batches follow each other through the stages equal one device, or say why they wait."""

from __future__ import annotations

import logging
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.support import oracle, processes
from tests.support.trainer_runs import QUIET, quiet

WIDTH, ROWS, SIZE = 6, 23, 4


class Evaluated(L.LightningModule):
    """What users write in evaluation steps and hooks; no hook between two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=WIDTH)
        self.auroc = torchmetrics.classification.MulticlassAUROC(num_classes=WIDTH)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.model(self.embed(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.losses.append(loss)
        self.accuracy(logits, y)
        self.auroc.update(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("largest", logits.max(), reduce_fx="max")
        self.log("index", float(batch_idx), on_step=True, on_epoch=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def _log_losses(self) -> None:
        self.log("mean", torch.stack(self.losses).mean())
        self.log("auroc", self.auroc.compute())
        self.auroc.reset()
        self.losses.clear()

    on_validation_epoch_end = on_test_epoch_end = _log_losses

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"class": self(batch[0]).argmax(-1), "row": batch[0][:, 0], "index": batch_idx}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Kept:
    """Something that a step returns, of which the process knows whether anybody keeps it."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self) -> None:
        Kept.alive.add(self)


class Large(Evaluated):
    """Returns what must not stay in memory."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.model(self.embed(batch[0]))
        most.append(len(Kept.alive))
        return {"class": batch[1], "kept": Kept()}


most: list[int] = []
"""The number of outputs in memory at each step that came to its end."""


class Counts(Evaluated):
    """What the step computes before the layers depends on what earlier batches have left in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.seen += 1
        x, y = batch
        return super().validation_step((x * self.seen, y), batch_idx)


class Calibrates(Evaluated):
    """The last stage changes a buffer, which the first stage reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = super().validation_step((batch[0] - self.center, batch[1]), batch_idx)
        self.center += 0.1 * loss
        return loss


class Looks(Evaluated):
    """Scales a batch by what the batch before it has logged."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        scale = float(self.trainer.callback_metrics.get("loss_step", 1.0))
        return super().validation_step((batch[0] * scale, batch[1]), batch_idx)


class Late(Evaluated):
    """Changes only late what it reads in all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = super().validation_step((batch[0] * self.scale, batch[1]), batch_idx)
        if batch_idx == 2:
            self.scale = 2.0
        return loss


class Keeps(Evaluated):
    """Leaves something in attributes, which nothing reads before the layers but to see that it has not changed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.worst = 0.5, 0.0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        # the counters of the loop are those of one device, also in a step that runs ahead of it
        assert self.trainer.validate_loop.batch_progress.current.ready == batch_idx + 1
        assert self.trainer.validate_loop.batch_progress.current.completed == batch_idx
        loss = super().validation_step((batch[0] * self.scale, batch[1]), batch_idx)
        self.worst = max(self.worst, float(loss))
        self.log("worst", self.worst)
        return loss


class Hooked(Evaluated):
    """Has a hook between two batches, which changes what the next one computes."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("hook", outputs + batch_idx)
        with torch.no_grad():
            self.embed.bias += 1.0


class Moved(Evaluated):
    """Scales batches when they have come to the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch[0] * 2.0, batch[1])


class CountsInLayer(nn.Linear):
    """A layer with a metric of its own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.rows = torchmetrics.SumMetric()

    def forward(self, x: Tensor) -> Tensor:
        self.rows.update(len(x))
        return super().forward(x)


class Watched(Evaluated):
    """Has a metric in a layer, which is logged for each loader."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0] = CountsInLayer()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = super().validation_step(batch, batch_idx)
        self.log("rows", self.model[0].rows)
        return loss


class Breaks(Evaluated):
    """Fails in one of its layers."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        if batch_idx == 3 and self.trainer.global_rank == self.trainer.world_size - 1:
            raise ArithmeticError("the first stage fails in batch 3")
        return super().validation_step(batch, batch_idx)


class Steps(DummyLogger):
    """Keeps what is logged for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.logged.append({**metrics, "step": step})


class Writer(BasePredictionWriter):
    """Keeps the batches that it is given."""

    def __init__(self) -> None:
        super().__init__("batch")
        self.batches: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *others: Any) -> None:
        self.batches.append((indices, prediction["class"].tolist()))


class Rows(TensorDataset):
    """Counts the rows that were taken; may fail at one of them."""

    def __init__(self, rows: int = ROWS, fails_at: int | None = None) -> None:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        super().__init__(x, x.argmax(1))
        self.taken, self.fails_at = 0, fails_at

    def __getitem__(self, index: int) -> Any:
        self.taken += 1
        if index == self.fails_at:
            raise OSError("this row cannot be read")
        return super().__getitem__(index)


class Stream(IterableDataset):
    """Rows without a length."""

    def __iter__(self) -> Iterator[Any]:
        return (Rows()[index] for index in range(ROWS))


def loader(**options: Any) -> DataLoader:
    return DataLoader(Rows(**options), batch_size=SIZE)


CASES: dict[str, tuple[Callable[[], Evaluated], Callable[[], Any], dict[str, Any]]] = {
    "plain": (Evaluated, loader, {}),
    "kept": (Keeps, loader, {}),
    "two_loaders": (Evaluated, lambda: [loader(), loader(rows=9)], {}),
    "side_by_side": (Evaluated, lambda: L.pytorch.utilities.CombinedLoader([loader(), loader(rows=9)], "min_size"), {}),
    "no_length": (Evaluated, lambda: DataLoader(Stream(), batch_size=SIZE), {}),
    "limited": (Evaluated, loader, {"limit_val_batches": 3}),
    "counted": (Counts, loader, {}),
    "calibrated": (Calibrates, loader, {}),
    "hooked": (Hooked, loader, {}),
    "moved": (Moved, loader, {}),
    "looks": (Looks, loader, {}),
    "watched": (Watched, lambda: [loader(), loader(rows=9)], {}),
    "off": (Evaluated, loader, {}),
}
AHEAD = {"plain", "kept", "two_loaders", "side_by_side", "no_length", "limited"}
"""The cases that stream; all others run batch by batch."""


class SideBySide(Evaluated):
    """Joins the batches of two loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return super().validation_step([torch.cat(pair) for pair in zip(*batch, strict=True)], batch_idx)


CASES["side_by_side"] = (SideBySide, *CASES["side_by_side"][1:])


@contextmanager
def watched() -> Iterator[list[int]]:
    """The number of batches that this rank had run ahead, at every step."""
    from lightning_pipe.trainer.evaluation.stream import EvaluationStream

    found: list[int] = []
    original = EvaluationStream.step

    def step(stream: Any, args: Any) -> Any:
        found.append(sum(fetched.run is not None for fetched in stream._queue))
        return original(stream, args)

    EvaluationStream.step = step
    try:
        yield found
    finally:
        EvaluationStream.step = original


class Notes(logging.Handler):
    """Keeps the notes of the run."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def build(name: str, devices: int | None, **options: Any) -> tuple[L.Trainer, L.LightningModule, Steps]:
    from lightning_pipe import PipeStrategy

    quiet()
    L.seed_everything(7, verbose=False)
    logger = Steps()
    strategy = PipeStrategy(layers="model", stream_evaluation=name != "off", **options) if devices else "auto"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices or 1,
        strategy=strategy,
        **{**QUIET, "logger": logger, "max_epochs": 4, "inference_mode": False, **CASES[name][2]},
    )
    return trainer, CASES[name][0]().double(), logger


def validated(name: str, devices: int | None, **options: Any) -> dict[str, Any]:
    """What a case leaves behind: what is returned, logged and taken from the data."""
    trainer, module, logger = build(name, devices, **options)
    data = CASES[name][1]()
    notes, log = Notes(), logging.getLogger("lightning.pytorch.lightning_pipe")
    log.setLevel(logging.INFO)
    log.addHandler(notes)
    with watched() as ahead:
        returned = trainer.validate(module, data, verbose=False)
    log.removeHandler(notes)
    taken = data.dataset.taken if isinstance(data, DataLoader) and isinstance(data.dataset, Rows) else 0
    return {
        "returned": returned,
        "logged": logger.logged,
        "metrics": oracle.numbers(trainer.callback_metrics),
        "taken": taken,
        "ahead": max(ahead, default=0),
        "notes": notes.texts,
    }


def all_cases(process: int, devices: int | None, names: list[str], **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {name: validated(name, devices, **options) for name in names}
    if "plain" in names:
        trainer, module, _ = build("plain", devices, **options)
        trainer.callbacks += [writer := Writer(), EarlyStopping("loss_epoch", patience=0, min_delta=0.2)]
        data = DataLoader(Rows(), batch_size=SIZE)
        trainer.fit(module, data, data)
        found["fit"] = {"epochs": trainer.current_epoch, "metrics": oracle.numbers(trainer.callback_metrics)}
        found["test"] = trainer.test(module, data, verbose=False)
        with watched() as ahead:
            predictions = trainer.predict(module, [data, loader(rows=9)])
        found["predictions"] = [
            [{name: torch.as_tensor(value).tolist() for name, value in batch.items()} for batch in of_loader]
            for of_loader in predictions
        ]
        found["written"] = list(writer.batches)
        most.clear()
        trainer.predict(Large().double(), [data, loader(rows=9)], return_predictions=False)
        found["most"] = max(most, default=0)
        found["predicted_ahead"] = max(ahead, default=0)
    return found


def assert_same(found: dict[str, Any], plain: dict[str, Any], *, first: bool, names: list[str]) -> None:
    for name in names:
        ours, theirs = found[name], plain[name]
        for one, other in zip(ours["returned"], theirs["returned"], strict=True):
            assert one == pytest.approx(other, rel=1e-9), name
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-9), name
        if first:  # the only rank with a logger of its own, and the one that loads
            assert len(ours["logged"]) == len(theirs["logged"]), name
            for one, other in zip(ours["logged"], theirs["logged"], strict=True):
                assert one == pytest.approx(other, rel=1e-9), name
            assert ours["taken"] == theirs["taken"], name
    if "fit" in plain:
        assert found["fit"]["epochs"] == plain["fit"]["epochs"]
        assert found["fit"]["metrics"] == pytest.approx(plain["fit"]["metrics"], rel=1e-9)
        assert found["test"][0] == pytest.approx(plain["test"][0], rel=1e-9)
        assert found["predictions"] == plain["predictions"]
        assert found["written"] == plain["written"]
        assert found["most"] <= 1  # that of the step before


def run(ranks: int, names: list[str]) -> list[dict[str, Any]]:
    """The cases on several ranks, compared with one device."""
    plain = all_cases(0, None, names)
    several = processes.run_trainers(all_cases, ranks, timeout=100, devices=ranks, names=names)
    for process, found in enumerate(several):
        assert_same(found, plain, first=process == 0, names=names)
    return several


def check_two_ranks(names: list[str]) -> None:
    several = run(2, names)
    for name in names:
        # process 1 has the first stage
        assert several[0][name]["ahead"] == 0
        assert several[1][name]["ahead"] == (2 if name in AHEAD else 0), name
        text = " ".join(text for found in several for text in found[name]["notes"])
        assert REASONS.get(name, "") in text
        assert bool(text) == (name in REASONS)
    assert several[1].get("predicted_ahead", 2) == 2


REASONS = {
    "counted": "reads `self.seen`",
    "calibrated": "reads `self.center`",
    "hooked": "Hooked.on_validation_batch_end is called between two batches",
    "looks": "reads `self.trainer.callback_metrics`",
    "moved": "Moved.on_after_batch_transfer is called between two batches",
    "watched": "the metric 'model.0.rows' is part of a module",
}
OFTEN = ["plain", "kept", "looks", "counted", "hooked"]


def test_two_ranks_equal_one_device() -> None:
    check_two_ranks(OFTEN)


@pytest.mark.slow
def test_two_ranks_equal_one_device_in_rarer_cases() -> None:
    check_two_ranks([name for name in CASES if name not in OFTEN])


@pytest.mark.slow
def test_four_ranks_equal_one_device() -> None:
    names = [*OFTEN, "no_length", "side_by_side"]
    several = run(4, names)
    assert [found["plain"]["ahead"] for found in several] == [0, 2, 3, 4]


FAILURES: dict[str, tuple[Callable[[], Evaluated], Callable[[], DataLoader], str]] = {
    "late": (Late, loader, "reads `self.scale` before it calls the layers of other stages"),
    "step": (Breaks, loader, "the first stage fails in batch 3"),
    "data": (Evaluated, lambda: loader(fails_at=4 * SIZE + 1), "this row cannot be read"),
}


def failing(process: int, devices: int, name: str) -> tuple[str, int]:
    """The error of an evaluation, with its notes, and the number of batches that were logged before."""
    trainer, _, logger = build("plain", devices)
    try:
        trainer.validate(FAILURES[name][0]().double(), FAILURES[name][1](), verbose=False)
    except Exception as error:
        return "".join(traceback.format_exception(error)), len(logger.logged)
    return "", 0


@pytest.mark.parametrize("name", ["late", "step", pytest.param("data", marks=pytest.mark.slow)])
def test_a_rank_that_fails_ends_all_with_its_reason(name: str) -> None:
    found = processes.run_trainers(failing, 2, timeout=40, devices=2, name=name)
    for text, _ in found:
        assert FAILURES[name][2] in text
    if name == "late":
        assert "PipeStrategy(stream_evaluation=False)" in found[1][0]
    elif name == "data":
        # the hooks and the logger of the batches before come first, as on one device
        assert found[0][1] == 4


def test_two_replicas_of_two_ranks() -> None:
    names = ["plain", "counted", "off"]
    several = processes.run_trainers(all_cases, 4, timeout=80, devices=4, names=names, data_parallel_size=2)
    for found in several:
        # what batches log does not depend on whether they stream
        for key in ("returned", "logged", "metrics"):
            assert found["plain"][key] == found["off"][key]
    assert sorted(found["plain"]["ahead"] for found in several) == [0, 0, 1, 1]  # of three batches, the first one alone
    assert all(found["counted"]["ahead"] == 0 for found in several)
    # The replicas' numbers of batches differ, and every sample is predicted once. The predictions have a number of the
    # batch among them, so each replica keeps its own.
    plain = all_cases(0, None, ["plain"])["predictions"]
    for loader_, of_loader in enumerate(plain):
        rows = [row for batch in of_loader for row in batch["row"]]
        for process, found in enumerate(several):
            own = [row for batch in found["predictions"][loader_] for row in batch["row"]]
            assert own == rows[process // 2 :: 2]
