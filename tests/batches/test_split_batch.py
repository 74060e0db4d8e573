"""Batches of every form into micro-batches."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import InitVar, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from lightning_pipe.batches.micro_batches import divide_batch
from lightning_pipe.batches.split_batch import samples, split, twice
from lightning_pipe.engine.containers import map_leaves, signature
from lightning_pipe.errors import ConfigurationError

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: Any
    y: Any


@dataclass
class Scaled:
    x: Any
    scale: InitVar[float]
    mask: Any = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.mask, self.kept = self.x > scale, self.x * scale


def rows(length: int, *shape: int) -> torch.Tensor:
    return torch.arange(length * max(1, int(np.prod(shape)))).reshape(length, *shape)


SPLITTABLE = {
    "tensor": rows(5),
    "list": [rows(5, 2), rows(5)],
    "tuple": (rows(5), rows(5).double()),
    "dictionary": {"x": rows(5, 3), "y": rows(5), "scale": 2.0, "name": None},
    "ordered": OrderedDict(x=rows(5), y=rows(5)),
    "named_tuple": Pair(rows(5), None),
    "dataclass": Record(rows(5), "text"),
    "dataclass_that_derives": Scaled(rows(5), 2.0),
    "nested": {"a": [rows(5, 2), rows(5, 2)], "b": (rows(5, 1), rows(5))},
    "array": {"x": np.arange(5), "y": rows(5)},
    "strings": [list("abcde"), rows(5)],
    "constant_tuple": {"x": rows(5, 2), "size": (224, 224)},
    "broadcast": (rows(5, 2), rows(1, 2), torch.tensor(3.0)),
    "views": ([rows(5, 3, 4, 4), rows(5, 3, 4, 4)], rows(5)),
    "batch_encoding": BatchEncoding({"input_ids": rows(5, 3), "labels": rows(5, 3)}),
    "model_output": CausalLMOutput(logits=rows(5, 2)),
    "detection": (tuple(rows(3, i + 1, 2) for i in range(5)), tuple({"boxes": rows(i, 4)} for i in range(5))),
}


@pytest.mark.feature(
    "Data loaders",
    "batches of tuples, dictionaries, dataclasses and lists in each other",
    "works",
    "cut along the samples",
)
@pytest.mark.parametrize("name", SPLITTABLE)
def test_cuts_along_the_batch(name: str) -> None:
    batch = SPLITTABLE[name]
    assert samples(batch) == 5
    cut = divide_batch(batch, 1, 3)
    assert [samples(part) for part in cut.parts] == cut.sizes == [2, 2, 1]
    assert all(type(part) is type(batch) for part in cut.parts)
    assert leaves(cut.together((0, 1, 2))) == leaves(batch)
    assert leaves(cut.together((1, 2))) == leaves(split(batch, [2, 3])[1])
    assert leaves(split(twice(batch, cut.parts[0]), [2, 2])) == leaves([cut.parts[0], cut.parts[0]])


def leaves(node: Any) -> list[Any]:
    found: list[Any] = [str(signature(node))]
    map_leaves(lambda leaf: found.append(leaf.tolist() if hasattr(leaf, "tolist") else leaf), node)
    return found


def test_keeps_values_and_what_belongs_to_every_sample() -> None:
    first, second = split({"x": rows(5, 2), "names": list("abcde"), "table": rows(1, 2), "n": 7}, [3, 2])
    assert torch.equal(torch.cat([first["x"], second["x"]]), rows(5, 2))
    assert first["names"] + second["names"] == list("abcde")
    assert first["n"] == second["n"] == 7
    assert torch.equal(first["table"], second["table"])


def test_micro_batches_are_views() -> None:
    batch = rows(6, 2)
    parts = split(batch, [3, 3])
    assert parts[0].untyped_storage().data_ptr() == batch.untyped_storage().data_ptr()


def test_samples_of_varying_size_stay_whole() -> None:
    images, targets = split(SPLITTABLE["detection"], [3, 2])[0]
    assert [image.shape[1] for image in images] == [1, 2, 3]
    assert len(targets) == 3


def test_three_images_of_three_channels() -> None:
    batch = (tuple(rows(3, 4, 4) for _ in range(3)), tuple({"boxes": rows(i, 4)} for i in range(3)))
    assert samples(batch) == 3
    images, targets = split(batch, [2, 1])[0]
    assert len(images) == len(targets) == 2
    views = ([rows(3, 4, 4) for _ in range(3)], rows(3))
    assert [len(view) for view in split(views, [2, 1])[0][0]] == [2, 2, 2]


def test_two_fields_are_not_two_samples() -> None:
    parts = split(([rows(2, 3), rows(2, 3)], rows(2)), [1, 1])
    assert [leaf.shape[0] for leaf in tree_leaves(parts[0])] == [1, 1, 1]


UNCLEAR = {
    "different_lengths": (rows(32, 3), rows(10)),
    "packed_tokens": {"input_ids": rows(100), "cu_seqlens": rows(9)},
    "list_of_images": [rows(3, 4, 4) for _ in range(8)],
    "few_images": {"image": [rows(3, 4, 4) for _ in range(3)]},
    "samples_or_fields": (tuple(rows(3, 4) for _ in range(3)), tuple({"boxes": rows(i, 4)} for i in range(3))),
    "unknown_object": {"x": rows(3), "graph": object()},
    "sparse": {"x": torch.eye(3).to_sparse()},
    "text": "text",
    "nothing": {},
}


def test_names_that_default_collate_has_put_together_stay_with_their_samples() -> None:
    batch = default_collate([(torch.tensor(float(i)), f"sample {i}") for i in range(5)])
    first, second = split(batch, [3, 2])
    assert [f"sample {int(i)}" for i in first[0]] == list(first[1])
    assert [f"sample {int(i)}" for i in second[0]] == list(second[1])
    assert split([rows(5), (224, 224), ("cat", "dog")], [3, 2])[1][1:] == [(224, 224), ("cat", "dog")]


@pytest.mark.parametrize("name", UNCLEAR)
def test_refuses_what_is_unclear(name: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"(?s)micro_batches=1.*exact.*split_batch.*loss_weight.*register_batch"
    ):
        samples(UNCLEAR[name])


def test_never_more_micro_batches_than_samples() -> None:
    cut = divide_batch(rows(3), ranks=4, micro_batches=8)
    assert cut.sizes == [1, 1, 1]


def test_one_micro_batch_of_anything() -> None:
    cut = divide_batch({"graph": object()}, ranks=2, micro_batches=1)
    assert len(cut.parts) == 1
    assert cut.shares == [1.0]


def test_weights_by_samples_over_all_replicas() -> None:
    cut = divide_batch(rows(5), ranks=1, micro_batches=2)
    assert cut.shares == [0.6, 0.4]
    assert cut.weights(10.0) == [0.3, 0.2]


def test_own_split_and_weight() -> None:
    batch = {"input_ids": rows(6), "cu_seqlens": [0, 2, 6]}

    def by_sequence(batch: Any, count: int) -> list[Any]:
        assert count == 2
        ends = batch["cu_seqlens"]
        return [{"input_ids": batch["input_ids"][a:b]} for a, b in pairwise(ends)]

    cut = divide_batch(batch, 1, 2, split_batch=by_sequence, loss_weight=lambda part: len(part["input_ids"]) ** 2)
    assert cut.sizes == [2, 4]
    assert cut.shares == [0.2, 0.8]


def test_own_slices_along_the_first_dimension_are_counted() -> None:
    batch = {"x": rows(5), "names": list("abcde"), "scale": 2.0}
    found = divide_batch(batch, 1, 2, split_batch=lambda batch, m: split(batch, [3, 2]))
    assert (found.sizes, found.amounts) == ([3, 2], [3.0, 2.0])
    assert found.together((0, 1)) is batch
    with pytest.raises(ConfigurationError, match="cannot be put together"):
        divide_batch(rows(6), 1, 3, split_batch=lambda batch, m: split(batch, [2, 2, 2])).together((0, 1))


def test_own_slices_along_another_dimension_need_a_weight() -> None:
    def along_time(batch: Any, count: int) -> list[Any]:
        return [*batch.tensor_split(count, 1)]

    with pytest.raises(ConfigurationError, match=r"(?s)\[7, 7\].*loss_weight"):
        divide_batch(rows(7, 5), 1, 2, split_batch=along_time)
    found = divide_batch(rows(7, 5), 1, 2, split_batch=along_time, loss_weight=lambda part: part.shape[1])
    assert found.amounts == [3.0, 2.0]


def test_neighbours_are_put_together() -> None:
    cut = divide_batch({"x": rows(6), "scale": rows(1)}, 1, 3)
    assert torch.equal(cut.together((1, 2))["x"], rows(6)[2:])
    assert cut.together((0, 1))["scale"] is cut.batch["scale"]
    with pytest.raises(ConfigurationError, match="cannot be put together"):
        cut.together((0, 2))


def test_own_split_into_what_cannot_be_counted() -> None:
    def objects(batch: Any, count: int) -> list[Any]:
        return [object(), object()]

    with pytest.raises(ConfigurationError, match="loss_weight"):
        divide_batch(rows(4), 1, 2, split_batch=objects)
    assert divide_batch(rows(4), 1, 2, split_batch=objects, loss_weight=lambda part: 1.0).shares == [0.5, 0.5]


@dataclass
class Ranked:
    queries: Any
    ids: Any
    targets: Any


@pytest.mark.parametrize("make", [list, tuple])
@pytest.mark.parametrize("texts", [["a", "b", "c", "d"], [["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"]]])
@pytest.mark.parametrize("rows", [8, 2])
def test_texts_with_several_rows_each_are_not_clear(make: Any, texts: Any, rows: int) -> None:
    batch = Ranked(make(texts), make(["1", "2", "3", "4"]), torch.zeros(rows))
    with pytest.raises(ConfigurationError, match=f"tensors have length {rows}, and 2 sequences of texts have 4"):
        samples(batch)
    assert samples(Ranked(make(texts), make(["1", "2", "3", "4"]), torch.zeros(4))) == 4
    assert samples(Ranked(make(texts), None, torch.zeros(rows))) == rows  # names of classes, say
