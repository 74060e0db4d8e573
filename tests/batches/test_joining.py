"""What micro-batches return and log is what one step over the whole batch returns and logs, or the user is told."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics

from lightning_pipe import PipeStrategy
from lightning_pipe.batches.joining import join
from lightning_pipe.errors import ConfigurationError
from tests.support import oracle
from tests.support.lit_modules import dataset
from tests.support.pairs import pairs
from tests.support.trainer_runs import QUIET

SIZES, SHARES = [2, 1], [2 / 3, 1 / 3]


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        (torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([1, 2, 3])),
        (np.array([1, 2]), np.array([3]), np.array([1, 2, 3])),
        (["a", "b"], ["c"], ["a", "b", "c"]),
        ([{"id": 1}, {"id": 2}], [{"id": 3}], [{"id": 1}, {"id": 2}, {"id": 3}]),
        ((torch.zeros(2, 3), torch.ones(2)), (torch.zeros(1, 3), torch.ones(1)), (torch.zeros(3, 3), torch.ones(3))),
        (1.0, 4.0, 2.0),
        (torch.tensor(1.0), torch.tensor(4.0), torch.tensor(2.0)),
        (7, 7, 7),
        ("text", "text", "text"),
        (None, None, None),
        (torch.eye(3), torch.eye(3), torch.eye(3)),
        ({"n": 1.0}, {"n": 4.0}, {"n": 2.0}),
    ],
)
def test_joins_by_type(first: Any, second: Any, together: Any) -> None:
    unclear: list[str] = []
    found = join({0: {"x": first}, 1: {"x": second}}, SIZES, SHARES, unclear=unclear.append)["x"]
    assert type(found) is type(together)
    assert str(found) == str(together)
    assert unclear == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (2, 1),
        (3, 4),
        (torch.tensor(3), torch.tensor(3)),
        (True, False),
        (torch.eye(3), torch.ones(3, 3)),
        ("a", "b"),
        ([1, 2, 3], [1]),
        (1.0, None),
        ({1}, {2}),
    ],
)
def test_what_is_not_clear_becomes_a_list(first: Any, second: Any) -> None:
    unclear: list[str] = []
    found = join({0: {"x": first, "y": 1}, 1: {"x": second}}, SIZES, SHARES, unclear=unclear.append)
    assert str(found) == str({"x": [first, second], "y": [1, None]})
    assert unclear == ["['x']", "['y']"]


class Talkative(L.LightningModule):
    """Logs and returns numbers of every kind; compares nothing with a pipeline itself."""

    def __init__(self, summed: bool = False, extra: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(12, 12) for _ in range(3)), torch.nn.Linear(12, 4)).double()
        self.summed, self.extra = summed, extra
        self.seen: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.model(x.flatten(1))
        losses = F.cross_entropy(logits, y, reduction="none")
        loss = losses.sum() if self.summed else losses.mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("total", losses.sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("rows", float(len(x)), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("mean", losses.mean(), on_step=True, on_epoch=True)
        self.log("largest", losses.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("smallest", losses.min(), reduce_fx="min", on_step=False, on_epoch=True)
        self.log("constant", 0.25)
        self.log("sized", losses.mean(), batch_size=8, on_step=False, on_epoch=True)  # also in the last batch, of 5
        hits = (logits.argmax(-1) == y).sum()
        more = {"n": len(x), "hits": hits, "confusion": torch.bincount(y, minlength=5)} if self.extra else {}
        return {
            "loss": loss,
            "mean": losses.mean().item(),
            "three": 3,
            "labels": y,
            "list": y.tolist(),
            "nested": {"pair": (logits.detach(), y), "mean": losses.detach().mean()},
            **more,
        }

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(str({name: _rounded(value) for name, value in outputs.items()}))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return [round(number, 9) for number in torch.as_tensor(value, dtype=torch.float64).flatten().tolist()]


def fit(module: Talkative, strategy: Any) -> tuple[oracle.Trace, list[str]]:
    recorder = oracle.Recorder()
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, callbacks=[recorder], **QUIET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, torch.utils.data.DataLoader(dataset(21), batch_size=8))
    recorder.trace.metrics = oracle.numbers(trainer.callback_metrics)
    ours = ("not a mean", "not checked", "not a sum")
    return recorder.trace, [str(one.message) for one in caught if any(text in str(one.message) for text in ours)]


@pytest.mark.parametrize(
    ("options", "summed"),
    pairs([{}, {"stages": 1}, {"schedule": "gpipe", "micro_batches": 2}], [False, True], lambda one, _: one == 0),
)
def test_logs_and_returns_what_one_device_does(options: dict[str, Any], summed: bool) -> None:
    found, plain = Talkative(summed), Talkative(summed)
    expected, _ = fit(plain, "auto")
    weight = "sum" if summed else None
    trace, told = fit(found, PipeStrategy(**{"stages": 2, "micro_batches": 4, "loss_weight": weight, **options}))
    assert told == []
    oracle.assert_equal(trace, expected)
    assert found.seen == plain.seen


class Windowed(Talkative):
    """Averages the last losses."""

    def __init__(self, called: bool = False) -> None:
        super().__init__()
        self.called, self.window = called, torchmetrics.aggregation.RunningMean(window=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        (self.window if self.called else self.window.update)(found["loss"].detach())
        return found

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("window", self.window)


def test_a_metric_over_the_last_updates_gets_one_for_each_batch() -> None:
    for called in (False, True):
        with pytest.raises(ConfigurationError, match=r"(?s)`self\.window` keeps the last values.*on_train_batch_end"):
            fit(Windowed(called), PipeStrategy(stages=2, micro_batches=4))
    whole = fit(Windowed(), PipeStrategy(stages=2, micro_batches=1))[0]
    oracle.assert_equal(whole, fit(Windowed(), "auto")[0])


class Averaged(Talkative):
    """Gives metrics one number for each step, and one for each sample; the last losses in a hook.

    Makes a metric in its step, too.
    """

    NAMES = ("numbers", "called", "weighted", "samples", "in_hook")

    def __init__(self) -> None:
        super().__init__()
        self.window = torchmetrics.aggregation.RunningMean(window=3)
        self.means = torch.nn.ModuleDict({name: torchmetrics.MeanMetric() for name in self.NAMES})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found, count = super().training_step(batch, batch_idx), len(batch[0])
        torchmetrics.SumMetric().update(count)
        self.means["numbers"].update(found["mean"])
        self.means["called"](found["loss"].detach())
        self.means["weighted"].update(found["mean"], weight=count)
        self.means["samples"].update(found["nested"]["pair"][0])
        for name, metric in self.means.items():
            self.log(name, metric, on_step=False, on_epoch=True)
        return found

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.means["in_hook"].update(outputs["loss"])
        self.window.update(outputs["loss"].detach())
        self.log("window", self.window)


def test_a_mean_metric_counts_the_number_of_each_batch_once() -> None:
    """The last batch, of five samples, is cut into micro-batches of two samples and of one; metrics add up 32 bits."""
    found, plain = (fit(Averaged(), each)[0] for each in (PipeStrategy(stages=2, micro_batches=4), "auto"))
    oracle.assert_equal(found, plain, tolerance=1e-6)
    for trace in (found, plain):
        for values in (trace.metrics, *trace.logged):
            for name in Averaged.NAMES:
                values.pop(name, None)
    oracle.assert_equal(found, plain)


class Unknown(Talkative):
    """Counts rows in the step, by a metric that is no module of it when the run begins."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.listed, self.found = where, [torchmetrics.SumMetric()], 0.0
        self.tracker = torchmetrics.MetricTracker(torchmetrics.SumMetric(), maximize=True)

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()
        self.later = torchmetrics.SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        metrics = {"list": self.listed[0], "tracker": self.tracker, "later": self.later}
        metrics[self.where].update(len(batch[0]))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("where", ["list", "tracker", "later"])
def test_a_step_updates_metrics_that_are_known_when_the_run_begins(where: str) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)updates a SumMetric that was no module.*Make it in __init__"):
        fit(Unknown(where), PipeStrategy(stages=2, micro_batches=4))


def test_hooks_get_lists_of_counts() -> None:
    module = Talkative(extra=True)
    fit(module, PipeStrategy(stages=2, micro_batches=4))
    assert all(f"'{name}': [[" in module.seen[0] for name in ("n", "hits", "confusion"))


def test_a_sum_is_logged_as_such_without_a_comparison() -> None:
    """Compiled layers are not run for comparisons."""
    found, plain = Talkative(summed=True), Talkative(summed=True)
    expected, _ = fit(plain, "auto")
    found.model[1].compile(backend="eager")
    trace, _ = fit(found, PipeStrategy(stages=2, micro_batches=4, loss_weight="sum"))
    assert [
        oracle.close(one["loss_step"], other["loss_step"])
        for one, other in zip(trace.logged, expected.logged, strict=True)
    ]
    assert oracle.close(trace.metrics["loss_epoch"], expected.metrics["loss_epoch"])


class Evaluated(Talkative):
    """Its evaluations return what is no loss."""

    returned: Any = None

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("sum", F.cross_entropy(self.model(x.flatten(1)), y, reduction="sum"))
        return self.returned

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(dataset(21), batch_size=8)


@pytest.mark.parametrize(
    ("returned", "parts"),
    pairs([None, "text", torch.ones(3)], [1, 2], lambda returned, parts: (returned, parts) == (1, 1)),
)
def test_an_evaluation_may_return_no_loss_where_losses_are_sums(returned: Any, parts: int) -> None:
    found, plain = Evaluated(summed=True), Evaluated(summed=True)
    found.returned = plain.returned = returned
    expected, _ = fit(plain, "auto")
    options: dict[str, Any] = {"loss_weight": "sum", "evaluation_micro_batches": parts}
    trace, _ = fit(found, PipeStrategy(stages=2, micro_batches=4, **options))
    if parts == 1:
        oracle.assert_equal(trace, expected)


def test_tells_a_mean_that_was_said_to_be_a_sum() -> None:
    with pytest.raises(ConfigurationError, match="not a sum over the samples"):
        fit(Talkative(), PipeStrategy(stages=2, micro_batches=4, loss_weight="sum"))
