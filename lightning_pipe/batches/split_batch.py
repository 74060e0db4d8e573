"""Splits a batch into micro-batches, along dimension 0 of everything that has the batch's length."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipe.engine.batch_kinds import WHOLE, cut, kind_of
from lightning_pipe.engine.containers import children, rebuild
from lightning_pipe.errors import ConfigurationError

SplitBatch = Callable[[Any, int], Sequence[Any]]

_FEW = 4
"""A list of this many tensors is taken for the fields of a batch, a longer one of tensors alike for its samples."""
_HINT = (
    f"{WHOLE} Or say how to split it: PipeStrategy(split_batch=lambda batch, m: […]) returns m micro-batches, and "
    "loss_weight=lambda micro_batch: … says what each counts, where their samples cannot be counted. For all batches "
    "of a type lightning_pipe.register_batch says both."
)


def samples(batch: Any) -> int:
    """Number of samples in a batch: the length that all its tensors have on dimension 0.

    Tensors of length 1 and without dimensions belong to every sample. Lists of strings, numbers or dictionaries, and
    nested lists of tensors, may hold one element per sample instead.

    Args:
        batch: tensors, arrays, strings, numbers and `kind_of` batches in dictionaries, lists, tuples and dataclasses.

    Raises:
        ConfigurationError: the lengths differ, there is none, or the batch holds an object of unknown structure.

    Example:
        >>> samples({"image": torch.zeros(6, 3, 8, 8), "label": torch.zeros(6), "name": list("abcdef")})
        6
    """
    firm, loose = _evidence(batch)
    lengths = {length for _, length in firm} - {1} or {length for _, length in firm}
    if not lengths:
        lengths = {len(sequence) for _, sequence in loose if not _is_tensors(sequence)} or _of_loose(loose)
    if len(lengths) != 1:
        found = ", ".join(f"{path} {length}" for path, length in firm) or "no tensors"
        raise ConfigurationError(
            f"The number of samples in the batch is not clear. Lengths found: {found}.", hint=_HINT
        )
    length = lengths.pop()
    _check_texts(batch, length)
    for path, sequence in loose:
        _check_loose(path, sequence, length, certain=bool(firm))
    return length


def split(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Split a batch into micro-batches of the given sizes.

    Args:
        batch: as for `samples`; what does not have the batch's length goes into every micro-batch as it is.
        sizes: samples of every micro-batch; they add up to those of the batch.

    Returns:
        The micro-batches, of the same types as the batch; their tensors are views of the batch's.

    Example:
        >>> split({"x": torch.arange(5), "scale": 2.0}, [3, 2])
        [{'x': tensor([0, 1, 2]), 'scale': 2.0}, {'x': tensor([3, 4]), 'scale': 2.0}]
    """
    if len(sizes) == 1:
        return [batch]
    return _columns(batch, list(sizes), batch)


def twice(batch: Any, part: Any) -> Any:
    """A part of a batch, as `split` has cut it, with each of its samples two times.

    Raises:
        ConfigurationError: functions of its own cut it.
    """
    if part is batch:
        return part
    if isinstance(part, Tensor):
        return torch.cat([part, part])
    if isinstance(part, np.ndarray):
        return np.concatenate([part, part])
    contents = children(part)
    if contents is None or kind_of(part) is not None:
        raise _unknown("batch", f"a {type(part).__qualname__}")
    if isinstance(part, list | tuple) and len(part) != len(batch):
        return [*part, *part] if isinstance(part, list) else (*part, *part)
    whole = children(batch) or {}
    return rebuild(part, {key: twice(whole[key], child) for key, child in contents.items()})


def _columns(node: Any, sizes: list[int], batch: Any) -> list[Any]:
    """The parts of one node of the batch, one for every micro-batch."""
    length = sum(sizes)
    if (kind := kind_of(node)) is not None:
        return cut(node, kind, sizes) if kind.size(node) == length else [node] * len(sizes)
    if isinstance(node, Tensor | np.ndarray):
        if node.ndim == 0 or node.shape[0] != length:
            return [node] * len(sizes)
        return list(node.split_with_sizes(sizes)) if isinstance(node, Tensor) else np.split(node, np.cumsum(sizes)[:-1])
    contents = children(node)
    if contents is None:
        return [node] * len(sizes)
    if _is_per_sample(node, length, batch):
        ends = np.cumsum(sizes).tolist()
        return [node[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    columns = {key: _columns(child, sizes, batch) for key, child in contents.items()}
    return [rebuild(node, {key: column[i] for key, column in columns.items()}) for i in range(len(sizes))]


def _evidence(batch: Any) -> tuple[list[tuple[str, int]], list[tuple[str, Sequence[Any]]]]:
    """The lengths of tensors, and the sequences that may hold one element per sample."""
    firm: list[tuple[str, int]] = []
    loose: list[tuple[str, Sequence[Any]]] = []

    def walk(path: str, node: Any) -> None:
        if (kind := kind_of(node)) is not None:
            firm.append((path, kind.size(node)))
            return
        if isinstance(node, Tensor | np.ndarray):
            if isinstance(node, Tensor) and (node.layout is not torch.strided or node.is_nested):
                raise _unknown(path, f"a {node.layout} tensor")
            if node.ndim:
                firm.append((path, node.shape[0]))
            return
        contents = children(node)
        if contents is None:
            if not _is_plain(node):
                raise _unknown(path, f"a {type(node).__qualname__}")
        elif _may_be_samples(node, outermost=node is batch):
            loose.append((path, node))
        else:
            named = dataclasses.is_dataclass(node)
            for key, child in contents.items():
                walk(f"{path}.{key}" if named else f"{path}[{key!r}]", child)

    walk("batch", batch)
    return firm, loose


def _may_be_samples(node: Any, outermost: bool) -> bool:
    """Whether a sequence may hold one element per sample rather than the fields of a batch."""
    if not isinstance(node, list | tuple) or hasattr(node, "_fields") or not node:
        return False
    if outermost and all(isinstance(child, Tensor | np.ndarray) for child in node):
        return len(node) > _FEW and _is_tensors(node)
    return _is_tensors(node) or _is_records(node) or (isinstance(node, list) and all(map(_is_plain, node)))


def _is_per_sample(node: Any, length: int, batch: Any) -> bool:
    """Whether a sequence has one element per sample; images do unless other tensors have shown the batch's length."""
    if not isinstance(node, list | tuple) or hasattr(node, "_fields") or len(node) != length:
        return False
    if _is_tensors(node):
        return not all(_length(child) == length for child in node) or (_are_images(node) and not _evidence(batch)[0])
    if isinstance(node, tuple) and all(map(_is_text, node)):
        return True  # what default_collate makes of the strings of samples that are tuples
    return _is_records(node) or (isinstance(node, list) and all(map(_is_plain, node)))


def _is_tensors(node: Sequence[Any]) -> bool:
    """Tensors of one kind."""
    if not all(isinstance(child, Tensor | np.ndarray) for child in node):
        return False
    return len({(child.ndim, child.dtype) for child in node}) == 1


def _is_records(node: Sequence[Any]) -> bool:
    """Dictionaries or dataclasses of one kind, with tensors of different lengths or none inside."""
    if not all(isinstance(child, Mapping) or dataclasses.is_dataclass(child) for child in node):
        return False
    fields = [children(child) or {} for child in node]
    return len({tuple(each) for each in fields}) == 1


def _of_loose(loose: list[tuple[str, Sequence[Any]]]) -> set[int]:
    """The length where there is nothing but lists of tensors of one kind: fields of a batch, if they are few."""
    lengths = {_length(child) for _, sequence in loose for child in sequence}
    if any(len(sequence) > _FEW or _are_images(sequence) for _, sequence in loose):
        return set()
    return lengths


def _are_images(sequence: Sequence[Any]) -> bool:
    """Whether tensors look like single images: channels, height, width."""
    return all(child.ndim == 3 and len(child) in (1, 3, 4) for child in sequence)


def _check_loose(path: str, sequence: Sequence[Any], length: int, certain: bool) -> None:
    """Refuse a sequence that fits neither as one element per sample nor as fields of the batch."""
    inside = {_length(child) for child in _tensors(sequence)}
    if len(sequence) == length:
        if not certain and length > 1 and inside == {length} and not (_is_tensors(sequence) and _are_images(sequence)):
            raise ConfigurationError(
                f"{path} has {length} elements with tensors of length {length}: they may be samples or fields.",
                hint=_HINT,
            )
        return
    if not inside <= {length, 1, 0}:
        raise ConfigurationError(
            f"{path} has {len(sequence)} elements with tensors of length {', '.join(map(str, sorted(inside)))}, "
            f"but the batch has {length} samples.",
            hint=_HINT,
        )


def _check_texts(batch: Any, length: int) -> None:
    """Refuse several rows of tensors for each text, or several texts for each row, as ranking losses have them."""
    counts = Counter(_texts(batch, outermost=True))
    for count, times in counts.items():
        if times > 1 < count and length not in counts and (length % count == 0 or count % length == 0):
            raise ConfigurationError(
                f"The number of samples in the batch is not clear: its tensors have length {length}, and {times} "
                f"sequences of texts have {count} elements.",
                hint=_HINT,
            )


def _texts(node: Any, *, outermost: bool = False) -> Iterator[int]:
    """The lengths of sequences of texts, or of sequences of them."""
    several = isinstance(node, list | tuple) and not hasattr(node, "_fields") and not outermost
    if several and node:
        texts = (text for each in node for text in (each if isinstance(each, list | tuple) else [each]))
        if all(map(_is_text, texts)):
            yield len(node)
            return
    for child in (children(node) or {}).values():
        if not isinstance(child, Tensor):
            yield from _texts(child)


def _is_text(node: Any) -> bool:
    return isinstance(node, str | bytes)


def _tensors(node: Any) -> Iterator[Any]:
    if isinstance(node, Tensor | np.ndarray):
        yield node
    for child in (children(node) or {}).values():
        yield from _tensors(child)


def _length(tensor: Any) -> int:
    return len(tensor) if tensor.ndim else 0


def _is_plain(node: Any) -> bool:
    return node is None or isinstance(node, bool | int | float | complex | str | bytes | np.generic)


def _unknown(path: str, what: str) -> ConfigurationError:
    return ConfigurationError(f"{path} is {what}, which cannot be split into micro-batches.", hint=_HINT)
