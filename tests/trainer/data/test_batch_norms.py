"""Batch norm keeps samples together, and a pipeline equals a plain Trainer that accumulates the same slices."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
from torch import Tensor

from lightning_pipe import PipeStrategy
from tests.support import oracle
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet
from tests.trainer.data.test_short_batches import Normalised, data


class Printing(Normalised):
    """Keeps what it prints."""

    def __init__(self) -> None:
        super().__init__()
        self.printed = ""

    def print(self, *args: Any, **kwargs: Any) -> None:
        self.printed += " ".join(map(str, args))


class Accumulating(Normalised):
    """Runs its step over slices of the batch, as a loop of one's own would."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = zip(*(field.split(self.sizes) for field in batch), strict=True)
        losses = [super(Accumulating, self).training_step(part, batch_idx) for part in parts]
        return sum(size * loss for size, loss in zip(self.sizes, losses, strict=True)) / sum(self.sizes)  # type: ignore[return-value]


def batches(size: int) -> list[Any]:
    tensors = data(3 * size).tensors
    return [[field[start : start + size] for field in tensors] for start in range(0, 3 * size, size)]


def trained(process: int, size: int, options: dict[str, Any], ranks: int = 2) -> tuple[oracle.Trace, list[str], str]:
    quiet()
    module, recorder = Printing(), oracle.Recorder()
    strategy = PipeStrategy(layers="layers", stages=2, **options)
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=1, callbacks=[recorder], **QUIET
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, oracle.loader(batches(size)))
    recorder.trace.weights = oracle.state_of(module)
    return recorder.trace, [str(one.message) for one in caught if "batch norm" in str(one.message)], module.printed


def expected(size: int, sizes: list[int]) -> oracle.Trace:
    return oracle.fit(Accumulating(sizes), batches(size), clip=None)  # type: ignore[arg-type]


def same(found: oracle.Trace, other: oracle.Trace) -> bool:
    """Running statistics are those of whole batches, which no loop over slices has."""
    names = [name for name in other.weights if "running" not in name and "tracked" not in name]
    weights = all(oracle.close(found.weights[name], other.weights[name]) for name in names)
    return weights and found.losses == pytest.approx(other.losses, rel=1e-9)


@pytest.mark.feature(
    "Data loaders",
    "batch norm",
    "differs",
    'sees micro-batches; `"auto"` keeps 16 samples in each, and the plan says so',
)
def test_auto_keeps_sixteen_samples_together() -> None:
    trace, told, printed = run_trainers(trained, 2, size=33, options={})[0]
    assert same(trace, expected(33, [17, 16]))
    (line,) = told
    assert "1 batch norm sees 16 to 17 samples at a time, with micro_batches=1 all 33" in line
    assert 'micro_batches="auto" leaves them 16; predicted bubble 33.3%, with micro_batches=7 12.5%' in line
    assert "1 batch norm sees 16 to 17 samples" in " ".join(printed.split())


@pytest.mark.parametrize(("options", "number"), [({}, 1), ({"micro_batches": 1}, 1), ({"micro_batches": 4}, 4)])
def test_a_number_is_used_and_16_samples_stay_whole_without_one(options: dict[str, Any], number: int) -> None:
    trace, told, printed = trained(0, 16, options, ranks=1)
    truth = expected(16, [16 // number] * number)
    assert same(trace, truth)
    if number == 1:
        mean = "layers.1.running_mean"
        assert trace.weights[mean].tolist() == pytest.approx(truth.weights[mean].tolist())
    assert told == []  # one rank is never idle
    assert ("1 batch norm sees 4 samples at a time, with micro_batches=1 all 16" in printed) == (number == 4)
