"""What layers keep of their calls goes on from Trainer to Trainer; the state contract has what others do with it."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
from torch import Tensor

from lightning_pipe import PipeStrategy
from tests.support.processes import in_turn
from tests.support.state_programs import BATCH, Base
from tests.support.state_programs_layers import Counting, CountingLayers, LayersKeep, StateOfLayersReset
from tests.support.trainer_runs import QUIET, quiet


class LooksAhead(Counting):
    """Computes with what another layer of its stage keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[Counting] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + sum(0.1 * other.calls for other in self.at))


class LooksInItsStage(CountingLayers):
    def make(self) -> None:
        self.layers[0] = LooksAhead()
        self.layers[0].at.append(self.layers[1])


def found(process: int, devices: int | None, model: type[Base], **options: Any) -> dict[str, float]:
    """What evaluations log, before the training and after it: a second Trainer goes on with what the first has left."""
    quiet()
    micro_batches = options.setdefault("micro_batches", 1)
    options["compare_losses"] = False
    L.seed_everything(7, verbose=False)
    module = model().double()
    values = {}
    for trains in (False, True):

        def trainer(**settings: Any) -> L.Trainer:
            strategy: Any = PipeStrategy(layers="layers", **options) if devices else "auto"
            settings = {**QUIET, **settings, "max_epochs": 1}
            return L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, **settings)

        if trains:
            parts = 1 if devices else micro_batches
            trainer(accumulate_grad_batches=parts, limit_val_batches=0).fit(module, module.data(BATCH // parts))
        evaluates = trainer()
        evaluates.validate(module, module.data(BATCH), verbose=False)
        values[str(trains)] = float(evaluates.callback_metrics["value"])
    return values


CASES: list[tuple[type[Base], dict[str, Any]]] = [
    (LayersKeep, {"micro_batches": 2}),
    (StateOfLayersReset, {"stream_evaluation": False}),
    (StateOfLayersReset, {"micro_batches": 1, "schedule": "dualpipev"}),
    # where activations are computed again, too
    (LooksInItsStage, {"micro_batches": 2, "recompute": "always"}),
]


@pytest.mark.parametrize("numbers", [[2, 3], pytest.param([0, 1], marks=pytest.mark.slow)])
def test_what_layers_keep_equals_one_device(numbers: list[int]) -> None:
    calls = {number: partial(found, devices=2, model=CASES[number][0], **CASES[number][1]) for number in numbers}
    for number, ranks in in_turn(calls, 2).items():
        model, options = CASES[number]
        plain = found(0, None, model, micro_batches=options.get("micro_batches", 1))
        for values in ranks:
            assert values == pytest.approx(plain, rel=1e-9), CASES[number]


def test_one_rank_keeps_what_one_device_keeps() -> None:
    plain = found(0, None, LayersKeep, micro_batches=2)
    assert found(0, 1, LayersKeep, micro_batches=2, stages=2) == pytest.approx(plain, rel=1e-9)
