"""Which rank owns which entry of a checkpoint, and how the entries come to the rank that writes.

Every process dumps a checkpoint of its own, in which the values of other ranks are placeholders. The names of
parameters and buffers decide which rank owns an entry: in the model's state, in the state of averaged copies that
callbacks keep, and in the optimizer's state. All other entries come from the rank that writes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.intercept.absent_tensor import Origin, is_absent
from lightning_pipe.local_parts import is_divided, share, with_local
from lightning_pipe.parameters.releasing import named_tensors
from lightning_pipe.transport.base import Transport

Path = tuple[Any, ...]
_TAG = (1 << 24) - 1
_PIECE = 16 << 20
_PREFIXES = ("module.", "_orig_mod.")


Entry = tuple[list[Path], Any]
"""What a rank contributes to a checkpoint: its places (tied weights have several) and a value in host memory."""


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
        self.writer = writer
        self._shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(module)}
        self._owner = {name: _first(holders(name), writer) for name in self._shapes}
        having: dict[tuple[int, int], list[int]] = {}
        for rank, entries in enumerate(states):
            for entry in entries:
                having.setdefault(entry, []).append(rank)
        self._state_owner = {entry: _first(ranks, writer) for entry, ranks in having.items()}

    def of_tensor(self, key: Any, value: Any) -> int:
        """The rank that owns what a dictionary has under a key: a parameter, a buffer or a copy of one, or else."""
        name = plain_name(key, self._shapes)
        if name is None or not isinstance(value, Tensor) or tuple(value.shape) != self._shapes[name]:
            return self.writer
        return self._owner[name]

    def of_state(self, optimizer: int, parameter: Any) -> int:
        """The rank that owns what an optimizer keeps of a parameter."""
        return self._state_owner[optimizer, parameter]

    def have_states(self, optimizer: int) -> bool:
        """Whether any rank has a state of an optimizer."""
        return any(number == optimizer for number, _ in self._state_owner)

    def entries(self, checkpoint: Mapping[str, Any], rank: int) -> list[Entry]:
        """What a rank contributes to a checkpoint: what belongs to parameters and buffers that it owns."""
        found: dict[Any, tuple[list[Path], Any]] = {}
        for path, value, owner in self._walk(checkpoint):
            if owner == rank:
                key = _memory(value) if isinstance(value, Tensor) else path
                found.setdefault(key, ([], value))[0].append(path)
        return [(paths, replace_tensors(value, _on_host)) for paths, value in found.values()]

    def _walk(self, checkpoint: Mapping[str, Any]) -> Iterator[tuple[Path, Any, int]]:
        for number, index in state_entries(checkpoint):
            path = ("optimizer_states", number, "state", index)
            yield path, checkpoint["optimizer_states"][number]["state"][index], self.of_state(number, index)
        for path, value in _tensors({key: each for key, each in checkpoint.items() if key != "optimizer_states"}):
            if plain_name(path[-1], self._shapes) is not None:
                yield path, value, self.of_tensor(path[-1], value)


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


def gather(checkpoint: dict[str, Any], owners: Owners, transport: Transport) -> dict[str, Any] | None:
    """The whole checkpoint on the rank that writes; ``None`` on all others. Collective over the pipeline.

    Args:
        checkpoint: as this process has dumped it.
        owners: of its entries.
        transport: this process's transport.

    Raises:
        CutError: a part of it has no value on the rank that writes, and no rank owns it.
    """
    mine = owners.entries(checkpoint, transport.rank)
    if transport.rank != owners.writer:
        transport.send_object(len(mine), owners.writer, _TAG).wait()
        for entry in mine:
            send(entry, transport, owners.writer)
        return None
    for rank in range(transport.topology.ranks):
        if rank != owners.writer:
            mine += [receive(transport, rank) for _ in range(transport.receive_object(rank, _TAG))]
    tree = replace_tensors(checkpoint, lambda tensor: tensor)  # its containers are copied
    for path, value in ((path, value) for paths, value in mine for path in paths):
        node: Any = tree
        for step in path[:-1]:
            node = node[step]
        node[path[-1]] = value
    check_known(tree)
    for states in tree.get("optimizer_states", []):
        if "state" in states:
            numbers = sorted(key for key in states["state"] if isinstance(key, int))  # others belong to no parameter
            states["state"] = {number: states["state"][number] for number in numbers} | states["state"]
    return tree  # type: ignore[no-any-return]


def send(obj: Any, transport: Transport, rank: int) -> None:
    """Send an object that may be large, in pieces that fit into the memory of any transport."""
    parts = torch.split(torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8), _PIECE)
    transport.send_object(len(parts), rank, _TAG).wait()
    for part in parts:
        transport.send_object(part, rank, _TAG).wait()
        transport.receive_object(rank, _TAG)  # what is sent lies in memory until it has arrived


def receive(transport: Transport, rank: int) -> Any:
    """The object that another rank sends."""
    parts = []
    for _ in range(transport.receive_object(rank, _TAG)):
        parts.append(transport.receive_object(rank, _TAG))
        transport.send_object(None, rank, _TAG).wait()
    return pickle.loads(torch.cat(parts).numpy().data)


def check_known(tree: Any) -> None:
    """Raise if a part of a checkpoint has no value here, and no rank contributes it.

    Raises:
        CutError: says where it is.
    """
    for path, tensor in _tensors(tree):
        if is_absent(tensor):
            where = "checkpoint" + "".join(f"[{key!r}]" for key in path)
            raise getattr(tensor, "origin", Origin()).error(
                f"{where} comes from parameters of other ranks",
                "Add a dictionary with the names of the parameters: each value is then taken from a rank that has it.",
            )


def replace_tensors(node: Any, replace: Callable[[Tensor], Any]) -> Any:
    """A copy of nested containers in which tensors are replaced."""
    if isinstance(node, Tensor):
        return replace(node)
    if isinstance(node, dict):
        made = copy(node)  # of its type, with its attributes: the versions in a module's state
        made.update({key: replace_tensors(value, replace) for key, value in node.items()})
        return made
    if type(node) in (list, tuple):
        return type(node)(replace_tensors(value, replace) for value in node)
    return node


def divided_as(state: Any, parameter: Tensor | None) -> Any:
    """What an optimizer keeps of a parameter, from whole tensors: in parts, where those are of its shape."""
    if parameter is None or not is_divided(parameter):
        return state

    def part(tensor: Tensor) -> Tensor:
        alike = tensor.shape == parameter.shape
        return with_local(share(tensor, parameter).to(parameter.device, copy=True), parameter) if alike else tensor

    return replace_tensors(state, part)


def _tensors(node: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors in nested containers, with their places."""
    if isinstance(node, Tensor):
        yield path, node
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
    for key, value in items:
        yield from _tensors(value, (*path, key))


def _first(ranks: Sequence[int], writer: int) -> int:
    return writer if writer in ranks else min(ranks)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """The same for tensors that have the same memory: tied weights do, in one device's checkpoint as well."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _on_host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    # pickling takes all of the memory that a tensor is a view of
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
