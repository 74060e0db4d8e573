"""What micro-batches log becomes what the batch logs."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.trainer.whole_model.logging import Log, Logged, Merged, combine


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanMetric()


class Prefixing(Module):
    """Has a ``log`` of its own."""

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        super().log(f"my_{name}", value, *args, **kwargs)


def recorded(calls: list[list[tuple[str, Any, dict[str, Any]]]], module: Module | None = None) -> Logged:
    """The log after each micro-batch has made its calls."""
    module = module or Module()
    log = Log(module, {id(module.metric): "metric"})
    logged: Logged = {}
    with log.installed():
        for index, of_micro_batch in enumerate(calls):
            with log.recording(logged, index):
                for name, value, options in of_micro_batch:
                    module.log(name, value, **options)
    return logged


def merge(logged: Logged, samples: list[float]) -> list[Merged]:
    return Log(Module(), {}).merge(logged, samples, samples, {})


def results(logged: Logged, samples: list[float]) -> dict[str, float]:
    return {one.key[1]: one.result for one in merge(logged, samples)}


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("mean", 2.5),
        ("avg", 2.5),
        (torch.mean, 2.5),
        ("sum", 5.0),
        (sum, 5.0),
        ("min", 1.0),
        ("max", 4.0),
        (torch.max, 4.0),
    ],
)
def test_reductions(reduction: Any, expected: float) -> None:
    calls = [[("x", torch.tensor(1.0), {"reduce_fx": reduction})], [("x", torch.tensor(4.0), {"reduce_fx": reduction})]]
    assert results(recorded(calls), [2, 2]) == {"x": expected}


def test_batch_size_given_by_the_user_is_the_weight() -> None:
    calls = [[("x", 1.0, {"batch_size": 1})], [("x", 4.0, {"batch_size": 2})]]
    (merged,) = merge(recorded(calls), [10, 10])
    assert merged.result == 3.0
    assert merged.weight == 3


def test_batch_size_of_whole_batches_is_no_weight_in_smaller_ones_either() -> None:
    log = Log(Module(), {})
    calls = [[("x", 1.0, {"batch_size": 4})], [("x", 4.0, {"batch_size": 4})]]
    for samples, expected in (([3.0, 1.0], 1.75), ([1.0, 1.0], 2.5), ([2.0, 1.0], 2.0)):
        (merged,) = log.merge(recorded(calls), samples, samples, {})
        assert (merged.result, merged.constant) == (expected, True)
    assert not merge(recorded(calls), [1, 1])[0].constant


def test_values_logged_by_some_micro_batches_alone() -> None:
    calls = [[("x", 1.0, {})], [("y", 4.0, {})], [("x", 3.0, {})]]
    merged = {one.key[1]: one for one in merge(recorded(calls), [2, 2, 2])}
    assert merged["x"].result == 2.0
    assert (merged["x"].values, merged["x"].weight) == ([1.0, 3.0], 4)


def test_a_name_logged_twice_stays_two_calls() -> None:
    calls = [[("x", 1.0, {}), ("x", 2.0, {})]] * 2
    assert [one.result for one in merge(recorded(calls), [1, 1])] == [1.0, 2.0]


def test_not_a_number_is_not_lost() -> None:
    for reduction in ("mean", "sum", "min", "max"):
        calls = [[("x", value, {"reduce_fx": reduction})] for value in (1.0, math.nan, 2.0)]
        assert math.isnan(results(recorded(calls), [1, 1, 1])["x"])


def test_parts_of_several_ranks() -> None:
    first = merge(recorded([[("x", 1.0, {})], [("x", 2.0, {})]]), [1, 1])
    second = merge(recorded([[("x", 6.0, {})]]), [2])
    (merged,) = combine([*first, *second])
    assert merged.result == (1 + 2 + 12) / 4


def test_runs_cut_short_are_forgotten() -> None:
    module = Module()
    log, logged = Log(module, {}), Logged()
    with log.installed(), contextlib.suppress(KeyboardInterrupt), log.recording(logged, 0):
        module.log("x", 1.0)
        raise KeyboardInterrupt
    assert logged == {}


def test_runs_that_compute_again_count_no_more() -> None:
    module = Module()
    log, logged = Log(module, {}), Logged()
    with log.installed():
        for value in (1.0, 2.0):
            with log.recording(logged, 0):
                module.log("x", value)
    assert results(logged, [1]) == {"x": 1.0}


def test_a_value_changed_later_is_kept_as_it_was() -> None:
    module = Module()
    log, logged = Log(module, {}), Logged()
    value = torch.ones(1)
    with log.installed(), log.recording(logged, 0):
        module.log("x", value)
        value.mul_(5)
    assert results(logged, [1]) == {"x": 1.0}


def test_dictionaries_and_own_log_methods() -> None:
    module = Prefixing()
    log, logged = Log(module, {}), Logged()
    with log.installed(), log.recording(logged, 0):
        module.log_dict({"a": 1.0, "b": torch.tensor(2)})
    assert results(logged, [1]) == {"my_a": 1.0, "my_b": 2.0}


def test_options_without_names_are_those_of_lightning() -> None:
    module, logged = Module(), Logged()
    log = Log(module, {})
    with log.installed(), log.recording(logged, 0):
        module.log("x", 1.0, False, None, True, None, "sum", False, False, None, True, 3)
    (one,) = logged[0].values()
    assert one.reduction == "sum"
    assert one.options["on_step"] is True
    assert one.options["batch_size"] == 3


def test_metrics_go_by_their_name() -> None:
    module = Module()
    module.metric(3.0)
    (merged,) = merge(recorded([[("m", module.metric, {"on_step": True})]], module), [1])
    assert isinstance(merged, Merged)
    assert (merged.metric, merged.result) == ("metric", 3.0)


def test_refusals_at_the_line_that_logs() -> None:
    with pytest.raises(ConfigurationError, match="no attribute"):
        recorded([[("m", torchmetrics.MeanMetric(), {})]])
    with pytest.raises(ConfigurationError, match="sync_dist_group"):
        recorded([[("x", 1.0, {"sync_dist_group": object()})]])
    with pytest.raises(Exception, match="cannot be logged"):
        recorded([[("x", "text", {})]])


def test_what_is_on_the_device_is_not_brought_there_again() -> None:
    """Lightning copies what it keeps beside the sum whenever it does so."""
    results = _ResultCollection(training=True)
    value = torch.tensor(2.0)

    def log(value: torch.Tensor) -> Any:
        results.log("training_step", "loss", value, on_step=False, on_epoch=True, batch_size=3)
        return results["training_step.loss"].meta

    first = log(value)
    assert log(value) is not first
    with Log(Module(), {}).installed():
        kept = log(value)
        assert log(value) is kept
        # to another device all of it goes as ever
        results["training_step.loss"].to(torch.device("meta"))
        assert results["training_step.loss"].value.device.type == "meta"
    results = _ResultCollection(training=True)
    with Log(Module(), {}).installed():
        log(torch.tensor(2.0))
        log(torch.tensor(4.0))
    assert results.metrics(on_step=False)["log"]["loss"] == 3
