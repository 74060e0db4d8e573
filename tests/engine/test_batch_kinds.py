"""Batches that are cut by functions of their own: of their type, of torch's, or of the user's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

import lightning_pipe
from lightning_pipe.batches.micro_batches import divide_batch
from lightning_pipe.batches.split_batch import split
from lightning_pipe.engine import batch_kinds
from lightning_pipe.engine.batch_kinds import cut, kind_of
from lightning_pipe.errors import ConfigurationError
from tests.support.batches import graphs

SEQUENCES = [torch.arange(float(n)) + 10 * n for n in (3, 1, 4, 2, 2)]


def values(packed: PackedSequence) -> list[list[float]]:
    return [sequence.tolist() for sequence in unpack_sequence(packed)]


@pytest.mark.parametrize("is_sorted", [False, True])
def test_packed_sequences_keep_their_order(is_sorted: bool) -> None:
    sequences = sorted(SEQUENCES, key=len, reverse=True) if is_sorted else SEQUENCES
    batch = pack_sequence(sequences, enforce_sorted=is_sorted)
    parts = split({"x": batch, "y": torch.arange(5)}, [2, 2, 1])
    assert [values(part["x"]) for part in parts] == [
        [each.tolist() for each in sequences[a:b]] for a, b in ((0, 2), (2, 4), (4, 5))
    ]
    assert all((part["x"].sorted_indices is None) == is_sorted for part in parts)


def test_what_was_added_to_a_batch_of_graphs_is_not_lost() -> None:
    batch = graphs([3, 1])
    batch.weight = torch.ones(4)  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"(?s)weight of a GraphBatch.*in the dataset.*micro_batches=1"):
        split(batch, [1, 1])


class Ratio:
    """Its ``split`` means something else."""

    def __len__(self) -> int:
        return 4

    def split(self, share: float) -> tuple[Any, Any]:
        return (self, self) if share < 1 else (self, None)


def test_another_split_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)a Ratio .*TypeError.*micro_batches=1.*register_batch\(Ratio"):
        split(Ratio(), [2, 2])


@pytest.mark.parametrize("node", ["a b", b"a", {"x": 1}, [1], (1, 2), torch.ones(2), None, 1])
def test_everyday_values_have_no_kind(node: Any) -> None:
    assert kind_of(node) is None


class Documents:
    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts


class Letters(Documents):
    pass


def _split(batch: Documents, sizes: Sequence[int]) -> list[Documents]:
    ends = list(accumulate(sizes))
    return [type(batch)(batch.texts[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


@pytest.fixture
def _registered() -> Iterator[None]:
    lightning_pipe.register_batch(Documents, split=_split, size=lambda batch: len(batch.texts))
    yield
    del batch_kinds._REGISTERED[Documents]


@pytest.mark.usefixtures("_registered")
def test_registered_types() -> None:
    batch: Mapping[str, Any] = {"documents": Letters("abcde"), "label": torch.arange(5)}
    divided = divide_batch(batch, ranks=2, micro_batches=3)
    assert divided.sizes == [2, 2, 1]
    assert [part["documents"].texts for part in divided.parts] == ["ab", "cd", "e"]
    assert divided.together((1, 2))["documents"].texts == "cde"
    assert divided.together((0, 1))["label"].tolist() == [0, 1, 2, 3]
    with pytest.raises(
        ConfigurationError, match="cannot be put together again"
    ):  # no function says how to put these together
        divided.together((0, 2))


def test_a_function_that_cuts_wrongly_is_named() -> None:
    kind = batch_kinds.BatchKind(lambda batch, sizes: _split(batch, [1] * len(sizes)), lambda batch: len(batch.texts))
    with pytest.raises(ConfigurationError, match=r"a Documents into parts of \[3, 2\] samples made \[1, 1\]"):
        cut(Documents("abcde"), kind, [3, 2])
