"""Types of batches that are cut by functions of their own: packed sequences, batches of graphs, what users register."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_pipe.errors import ConfigurationError

Split = Callable[[Any, Sequence[int]], Sequence[Any]]
Size = Callable[[Any], int]


class BatchKind(NamedTuple):
    """How batches of a type are cut, and how many samples one has."""

    split: Split
    size: Size


_REGISTERED: dict[type, BatchKind] = {}
_PLAIN = frozenset((dict, list, tuple, Tensor))
WHOLE = "PipeStrategy(micro_batches=1) runs the batch whole, which is exact."
"""The remedy for every batch that cannot be cut."""


def register_batch(type: type, split: Split, size: Size) -> None:
    """Say how batches of a type are cut into micro-batches, alone or as parts of other batches.

    Nothing needs to be said about tensors, arrays, dictionaries, lists, tuples, dataclasses, packed sequences, batches
    of graphs with ``to_data_list`` and ``from_data_list``, and objects with ``split(sizes)`` and a length or a
    ``batch_size``, such as TensorDict. Every process of a run must register the type, so call this where the script
    imports its modules.

    Args:
        type: the class of the batches; its subclasses are cut in the same way.
        split: ``split(batch, sizes)`` returns ``len(sizes)`` batches of consecutive samples, in their order, with
            ``sizes[i]`` samples each. It must leave ``batch`` as it is.
        size: ``size(batch)`` returns the number of samples in a batch, or in what ``split`` returned.
    """
    _REGISTERED[type] = BatchKind(split, size)


def kind_of(node: Any) -> BatchKind | None:
    """How a part of a batch is cut, if it has functions of its own for that."""
    kind = type(node)
    if kind in _PLAIN and kind not in _REGISTERED:
        return None  # for each micro-batch of each run
    registered = next((_REGISTERED[base] for base in kind.__mro__ if base in _REGISTERED), None)
    if registered is not None or isinstance(node, Tensor | str | bytes):
        return registered
    if hasattr(kind, "to_data_list") and hasattr(kind, "from_data_list"):
        return _GRAPHS
    if not hasattr(kind, "split"):
        return None
    if isinstance(node, Mapping | list | tuple) or is_dataclass(kind):
        # cut by what they hold, unless all of it has the same samples, as in a TensorDict
        return _ROWS if isinstance(size := getattr(node, "batch_size", None), torch.Size) and size else None
    return _ROWS if hasattr(kind, "__len__") or isinstance(getattr(node, "batch_size", None), int) else None


def cut(node: Any, kind: BatchKind, sizes: Sequence[int]) -> list[Any]:
    """Parts of a batch of a kind, of the given sizes; its functions may be a user's, who is told if they fail."""
    parts: list[Any] = []
    found: object = None
    try:
        parts = list(kind.split(node, list(sizes)))
        found = [kind.size(part) for part in parts]
    except ConfigurationError:
        raise
    except Exception as error:
        found = error
    if found != list(sizes):
        raise ConfigurationError(
            f"The function that cuts a {type(node).__qualname__} into parts of {list(sizes)} samples made {found!r}.",
            hint=f"{WHOLE} Or say how: lightning_pipe.register_batch({type(node).__qualname__}, split, size).",
        )
    return parts


def _consecutive(samples: Sequence[Any], sizes: Sequence[int]) -> list[Sequence[Any]]:
    return [samples[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _split_packed(batch: PackedSequence, sizes: Sequence[int]) -> list[PackedSequence]:
    is_sorted = batch.sorted_indices is None
    return [pack_sequence(list(part), is_sorted) for part in _consecutive(unpack_sequence(batch), sizes)]


def _split_graphs(batch: Any, sizes: Sequence[int]) -> list[Any]:
    # the class of a batch may be made for its graphs, and only the one that it is made of makes batches
    kind: Any = next(each for each in type(batch).__mro__ if "from_data_list" in vars(each))
    parts = [kind.from_data_list(part) for part in _consecutive(batch.to_data_list(), sizes)]
    if lost := sorted(_names(batch) - _names(parts[0])):
        what = f"{', '.join(lost)} of a {type(batch).__qualname__} cannot be cut: the graphs in it do not have that."
        raise ConfigurationError(what, hint=f"Add it to each graph, in the dataset. Or: {WHOLE}")
    return parts


def _names(batch: Any) -> set[str]:
    """The attributes of a batch of graphs, those of each type of nodes and edges too."""
    stores = [batch.to_dict()] if hasattr(batch, "to_dict") else []
    stores += [store for store in stores[0].values() if isinstance(store, Mapping)] if stores else []
    return {str(name) for store in stores for name in store}


def _rows(batch: Any) -> int:
    size = getattr(batch, "batch_size", None)
    return size if isinstance(size, int) else size[0] if isinstance(size, tuple) and size else len(batch)


_GRAPHS = BatchKind(_split_graphs, lambda batch: getattr(batch, "num_graphs", None) or len(batch.to_data_list()))
_ROWS = BatchKind(lambda batch, sizes: batch.split(sizes), _rows)
register_batch(PackedSequence, _split_packed, lambda batch: int(batch.batch_sizes[0]))
