"""What two micro-batches would be together."""

from __future__ import annotations

import pytest
import torch

from lightning_pipe.engine.first_batch.both_together import UnlikeError, joinings, readings
from lightning_pipe.intercept.call_record import LiveTensor, RunRecord
from lightning_pipe.intercept.crossing import Crossing
from lightning_pipe.tensor_spec import TensorSpec


def crossing(tensor: torch.Tensor) -> Crossing:
    return Crossing(RunRecord((), (LiveTensor(0, TensorSpec.of(tensor), False, False),)), {0: tensor})


def test_samples_are_put_behind_each_other() -> None:
    one, other = torch.zeros(2, 3), torch.ones(1, 3)
    assert next(joinings(one, other, (2, 1))).tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3]


def test_what_is_the_same_for_both_stays() -> None:
    table = torch.arange(5.0)
    assert next(joinings(table, table.clone(), (2, 3))).tolist() == table.tolist()


def test_of_two_views_of_a_batch_the_first_of_all_samples_may_come_first() -> None:
    one, other = torch.tensor([1.0, 1.1]), torch.tensor([2.0, 2.1])
    assert [each.tolist() for each in joinings(one, other, (1, 1))][:1] == [pytest.approx([1.0, 2.0, 1.1, 2.1])]


def test_positions_cannot_be_put_together() -> None:
    with pytest.raises(UnlikeError):
        readings([crossing(torch.tensor([0, 1])), crossing(torch.tensor([0, 1]))], (2, 2))


def test_the_record_has_the_shapes_of_both() -> None:
    [found, *_] = readings([crossing(torch.zeros(3, 2).t()), crossing(torch.ones(3, 1).t())], (2, 1))
    assert found is not None
    assert found.path.entries[0].spec == TensorSpec((3, 3), torch.float32, (1, 3))
    assert found.tensors[0].stride() == (1, 3)


def test_what_has_a_first_dimension_of_length_1_may_belong_to_all_samples() -> None:
    """A bias for two heads and two samples: with four samples it would be one for two heads, or for four."""
    bias = torch.rand(1, 2, 3)
    found = readings([crossing(bias), crossing(bias.clone())], (2, 2))
    assert [each and tuple(each.tensors[0].shape) for each in found][::2] == [(1, 4, 3), (1, 2, 3)]
