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
from tests.support.state_programs_layers import Counting, CountingLayers, StateOfLayersReset
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
    (StateOfLayersReset, {"micro_batches": 1, "schedule": "dualpipev"}),
    # where activations are computed again, too
    (LooksInItsStage, {"micro_batches": 2, "recompute": "always"}),
]


def test_what_layers_keep_equals_one_device() -> None:
    calls = {model: partial(found, devices=2, model=model, **options) for model, options in CASES}
    ranks = in_turn(calls, 2)
    for model, options in CASES:
        plain = found(0, None, model, micro_batches=options["micro_batches"])
        for values in ranks[model]:
            assert values == pytest.approx(plain, rel=1e-9), model
