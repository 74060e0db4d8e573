"""What a layer reads of another one that changes it is what it reads on one device, or an error."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.support.pairs import pairs
from tests.trainer.test_layer_state import Layer, Model, check


class Looks(Layer):
    """Computes with what another layer keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[Layer] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + sum(0.1 * other.calls + 0.1 * sum(other.items) for other in self.at))


class Looking(Model):
    reader, other = 3, 0

    def __init__(self) -> None:
        super().__init__()
        self.layers[self.reader] = Looks()
        self.layers[self.reader].at.append(self.layers[self.other])


class LooksAhead(Looking):
    reader, other = 0, 3


class LooksAheadOnce(LooksAhead):
    """Trains with one batch alone: the error must come at its end."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = True


class LooksAheadInItsStage(Looking):
    reader, other = 0, 1


LINEAR: list[tuple[int, dict[str, Any]]] = [(2, {"micro_batches": 2}), (2, {"micro_batches": 2, "recompute": "always"})]
FOLDED: list[tuple[int, dict[str, Any]]] = [
    (1, {"micro_batches": 2, "stages": 2}),
    (2, {"micro_batches": 4, "stages": 4, "schedule": "interleaved"}),
    (2, {"micro_batches": 2, "schedule": "dualpipev"}),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("model", "devices", "options"),
    pairs([Looking, LooksAheadInItsStage], LINEAR) + pairs([Looking], FOLDED),
)
def test_what_a_layer_reads_of_one_that_ran_before_equals_one_device(
    model: type[Model], devices: int, options: dict[str, Any]
) -> None:
    check(model, devices, **options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("model", "devices", "options"), pairs([LooksAhead, LooksAheadOnce], LINEAR + FOLDED))
def test_what_a_layer_reads_of_one_that_runs_later_is_refused(
    model: type[Model], devices: int, options: dict[str, Any]
) -> None:
    with pytest.raises(Exception, match=r"'layers\.0' reads `self\.layers\.3\.(calls|items)`"):
        check(model, devices, **options)
