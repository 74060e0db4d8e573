"""What two micro-batches would be together."""

from __future__ import annotations

import pytest
import torch

from lightning_pipe.engine.both_together import UnlikeError, both_together
from lightning_pipe.intercept.call_record import LiveTensor, RunRecord
from lightning_pipe.intercept.crossing import Crossing
from lightning_pipe.tensor_spec import TensorSpec


def crossing(tensor: torch.Tensor) -> Crossing:
    return Crossing(RunRecord((), (LiveTensor(0, TensorSpec.of(tensor), False, False),)), {0: tensor})


def joined(one: torch.Tensor, other: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
    found = both_together([crossing(one), crossing(other)], sizes)
    assert found is not None
    return found.tensors[0]


def test_samples_are_put_behind_each_other() -> None:
    assert joined(torch.zeros(2, 3), torch.ones(1, 3), (2, 1)).tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3]


def test_what_is_the_same_for_both_stays() -> None:
    table = torch.arange(5.0)
    assert joined(table, table.clone(), (2, 3)).tolist() == table.tolist()


@pytest.mark.parametrize(
    "pair",
    [
        (torch.tensor([0, 1]), torch.tensor([0, 1])),  # positions
        (torch.tensor([1.0]), torch.tensor([2.0])),  # what is one for all samples
        (torch.zeros(4, 3), torch.ones(4, 3)),  # several elements per sample
        (torch.zeros(3, 2), torch.ones(3, 2)),  # samples along another dimension
        (torch.zeros(3, 2).t(), torch.ones(3, 2).t()),  # samples between each other in memory
    ],
)
def test_other_tensors_cannot_be_put_together(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(UnlikeError):
        joined(*pair, (2, 2))


def test_the_record_has_the_shapes_of_both() -> None:
    pair = [torch.full((size, 2, 3), float(size)).transpose(1, 2) for size in (2, 1)]
    found = both_together([crossing(each) for each in pair], (2, 1))
    assert found is not None
    assert found.path.entries[0].spec == TensorSpec((3, 3, 2), torch.float32, (6, 1, 3))
    assert found.tensors[0].stride() == (6, 1, 3)
