"""What each rank contributes to a checkpoint, and how its tensors come to the rank that writes.

Every process dumps a checkpoint of its own, in which the values of other ranks are placeholders. The names of
parameters and buffers decide which rank owns an entry: in the model's state, in the state of averaged copies that
callbacks keep, and in the optimizer's state. All other entries come from the rank that writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipe.intercept.absent_tensor import Origin, is_absent
from lightning_pipe.parameters.ownership import named_tensors
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.objects import as_bytes

Path = tuple[Any, ...]
_TAG = (1 << 24) - 1
_PIECE = 16 << 20
_PREFIXES = ("module.", "_orig_mod.")


class Pending(NamedTuple):
    """In the place of a tensor that another rank has.

    Equal objects belong to tensors that share their memory, as tied weights do.
    """

    rank: int
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Owners:
    """Who owns which entry of a checkpoint.

    Args:
        module: the LightningModule, for the names and shapes of its parameters and buffers.
        holders: the pipeline ranks that have the true value of a name.
        states: for each pipeline rank the optimizer states that it has, as numbers of optimizer and parameter.
        writer: the pipeline rank that writes, and owns what it holds.
    """

    def __init__(
        self,
        module: nn.Module,
        holders: Callable[[str], tuple[int, ...]],
        states: Sequence[Iterable[tuple[int, int]]],
        writer: int,
    ) -> None:
        self._shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(module)}
        self._owner = {name: _first(holders(name), writer) for name in self._shapes}
        having: dict[tuple[int, int], list[int]] = {}
        for rank, entries in enumerate(states):
            for entry in entries:
                having.setdefault(entry, []).append(rank)
        self._state_owner = {entry: _first(ranks, writer) for entry, ranks in having.items()}

    def entries(self, checkpoint: Any) -> Iterator[tuple[Path, Any, int]]:
        """The entries that belong to parameters and buffers: path, value and owner."""
        for entry in state_entries(checkpoint):
            number, index = entry
            path = ("optimizer_states", number, "state", index)
            yield path, checkpoint["optimizer_states"][number]["state"][index], self._state_owner[entry]
        yield from self._named(checkpoint, ())

    def _named(self, node: Any, path: Path) -> Iterator[tuple[Path, Any, int]]:
        if path == ("optimizer_states",):
            return
        items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list | tuple) else ()
        for key, value in items:
            if isinstance(value, Tensor):
                name = self._name(key)
                if name is not None and tuple(value.shape) == self._shapes[name]:
                    yield (*path, key), value, self._owner[name]
            else:
                yield from self._named(value, (*path, key))

    def _name(self, key: Any) -> str | None:
        """The parameter or buffer that a key names, alone or with the prefix of a wrapper."""
        return plain_name(key, self._shapes)


@dataclass
class RankEntries:
    """What a rank contributes to the checkpoint.

    Args:
        rank: the rank.
        items: paths and values, with `Pending` in the place of tensors.
        tensors: the tensors, each memory once.
        keys: a name for each tensor.
    """

    rank: int
    items: list[tuple[Path, Any]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)

    def add(self, path: Path, value: Any) -> None:
        """Add an entry."""
        self.items.append((path, self._without_tensors(value, path)))

    def _without_tensors(self, value: Any, path: Path) -> Any:
        if isinstance(value, Tensor):
            return self._pending(value, path)
        if isinstance(value, dict):
            return {key: self._without_tensors(each, (*path, key)) for key, each in value.items()}
        return value

    def _pending(self, tensor: Tensor, path: Path) -> Pending:
        number = self._numbers.setdefault(shared_memory(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor.detach())
            self.keys.append(".".join(map(str, path)))
        return Pending(self.rank, number, tuple(tensor.shape), tensor.dtype)


def plain_name(key: Any, names: Container[str]) -> str | None:
    """The name of a parameter or buffer that is meant by a key, which may have the prefix of a wrapper."""
    if not isinstance(key, str):
        return None
    if key in names:
        return key
    return next((plain_name(key[len(prefix) :], names) for prefix in _PREFIXES if key.startswith(prefix)), None)


def state_entries(checkpoint: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The optimizer states in a checkpoint, as numbers of optimizer and parameter."""
    states = checkpoint.get("optimizer_states", [])
    return [(number, index) for number, state in enumerate(states) for index in state.get("state", {})]


def _first(ranks: Sequence[int], writer: int) -> int:
    return writer if writer in ranks else min(ranks)


def rank_entries(checkpoint: dict[str, Any], owners: Owners, rank: int) -> RankEntries:
    """The entries of a checkpoint that a rank owns."""
    result = RankEntries(rank)
    for path, value, owner in owners.entries(checkpoint):
        if owner == rank:
            result.add(path, value)
    return result


def send_items(mine: RankEntries, transport: Transport, writer: int) -> None:
    """Send the entries of this rank, without their tensors, to the rank that writes."""
    transport.send_object((mine.items, mine.keys), writer, _TAG).wait()


def shared_memory(tensor: Tensor) -> tuple[Any, ...]:
    """The same for tensors that have the same memory: tied weights do, in one device's checkpoint as well."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of a tensor, in pieces that fit into any memory."""
    if tensor.numel():
        yield from torch.split(as_bytes(tensor.cpu()), _PIECE)


def send_tensors(mine: RankEntries, transport: Transport, writer: int) -> None:
    """Send the tensors that this rank contributes, one after the other."""
    for tensor in mine.tensors:
        for part in pieces(tensor):
            transport.send_object(part, writer, _TAG).wait()
            transport.receive_object(writer, _TAG)  # what is sent lies in memory until it has arrived


def receive_items(transport: Transport, rank: int) -> tuple[list[tuple[Path, Any]], list[str]]:
    """The entries that another rank contributes, and names for their tensors."""
    items, keys = transport.receive_object(rank, _TAG)
    return items, keys


def receive_pieces(transport: Transport, leaf: Pending) -> Iterator[Tensor]:
    """The bytes of the next tensor of another rank, as they come."""
    for _ in range(0, math.prod(leaf.shape) * leaf.dtype.itemsize, _PIECE):
        piece = transport.receive_object(leaf.rank, _TAG)
        transport.send_object(None, leaf.rank, _TAG).wait()
        yield piece


def assembled(checkpoint: dict[str, Any], items: Iterable[tuple[Path, Any]]) -> dict[str, Any]:
    """The checkpoint with other entries at some paths; containers on the way are copied, the rest is shared.

    Example:
        >>> assembled({"a": {"b": 1, "c": 2}}, [(("a", "b"), 3), (("a", "c"), REMOVED)])
        {'a': {'b': 3}}
    """
    tree: dict[Any, Any] = {}
    for path, value in items:
        node = tree
        for step in path[:-1]:
            node = node.setdefault(step, {})
        node[path[-1]] = _Leaf(value)
    result: dict[str, Any] = _merged(checkpoint, tree)
    return result


def check_known(tree: Any, path: Path = ()) -> None:
    """Raise if a part of a checkpoint has no value here, and no rank contributes it.

    Raises:
        CutError: says where it is.
    """
    if isinstance(tree, Tensor) and is_absent(tree):
        where = "checkpoint" + "".join(f"[{key!r}]" for key in path)
        raise getattr(tree, "origin", Origin()).error(
            f"{where} comes from parameters of other ranks",
            "Add a dictionary with the names of the parameters: each value is then taken from a rank that has it.",
        )
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    for key, value in items:
        check_known(value, (*path, key))


REMOVED = object()


class _Leaf(NamedTuple):
    value: Any


def _merged(node: Any, changes: Any) -> Any:
    if isinstance(changes, _Leaf):
        return changes.value
    if isinstance(node, list | tuple):
        parts = [_merged(value, changes[i]) if i in changes else value for i, value in enumerate(node)]
        return parts if isinstance(node, list) else tuple(parts)
    items = {**node, **{key: _merged(node.get(key, {}), change) for key, change in changes.items()}}
    return _like(node, {key: value for key, value in items.items() if value is not REMOVED})


def leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """The values of nested dictionaries that are no dictionaries, with paths."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves((*path, key), each)
    else:
        yield path, value


def _like(node: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """A dictionary of the same type with other items; its attributes (the versions in a module's state) stay."""
    if type(node) is dict:
        return items
    copy = node.copy()
    copy.clear()
    copy.update(items)
    vars(copy).update(getattr(node, "__dict__", {}))
    return copy


def replace_tensors(node: Any, replace: Callable[[Any], Any], kinds: type | tuple[type, ...] = Tensor) -> Any:
    """A copy of nested containers in which tensors, or what else is asked for, are replaced."""
    if isinstance(node, kinds):
        return replace(node)
    if isinstance(node, dict):
        return _like(node, {key: replace_tensors(value, replace, kinds) for key, value in node.items()})
    if type(node) in (list, tuple):
        return type(node)(replace_tensors(value, replace, kinds) for value in node)
    return node
