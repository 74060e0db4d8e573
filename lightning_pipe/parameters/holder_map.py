"""Which ranks hold which parameter and buffer, by name: the map alone, nothing is freed or fetched here.

A module of three layers on two ranks, with code outside the layers (``self.scale``) and one weight used twice::

                          rank 0                rank 1 (computes the loss)
    layer of one stage    layers.0.weight       layers.1.weight, layers.2.bias
    tied weight           layers.0.weight ===== layers.2.weight      both ranks; gradients are summed at the end
    outside the layers    scale (?)             scale (?)            everyone until the first batch, then its users
    nobody uses it        average (kept)        average              the loss ranks; the others keep their copies

Schedules with several pipes, such as Chimera, compute a stage on two ranks: its layers have *copies*, one on each. Data
parallelism adds *replicas*: the same rank of every pipeline holds the same names. The map counts ranks of one pipeline;
`Topology.holders` turns these into the processes of all replicas, whose gradients are summed together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn


class HolderMap:
    """The holders of every parameter and buffer, as pipeline ranks.

    A tensor with several names has its holders under the first of them.

    Args:
        module: the user's module.
        layers: the layer sequence with dotted names.
        layer_ranks: for each layer the ranks that compute it.
        ranks: number of ranks in the pipeline.
        loss_ranks: the ranks that compute the loss.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Sequence[tuple[str, nn.Module]],
        layer_ranks: Sequence[tuple[int, ...]],
        ranks: int,
        loss_ranks: tuple[int, ...],
    ) -> None:
        self._module, self._everyone, self._loss_ranks = module, tuple(range(ranks)), loss_ranks
        self._holders: dict[str, tuple[int, ...]] = {}
        self._names: dict[int, tuple[Tensor, str]] = {}  # with the tensor, so that its ``id`` stays its own
        self._first_names: dict[str, str] = {}
        self._in_layers: set[str] = set()
        self._layer_users: dict[str, set[int]] = {}
        self._fill(layers, layer_ranks)

    def _fill(self, layers: Sequence[tuple[str, nn.Module]], layer_ranks: Sequence[tuple[int, ...]]) -> None:
        """Find the holders of what the layers own; the rest is held everywhere for now."""
        users: dict[int, set[int]] = {}
        for (_, layer), ranks in zip(layers, layer_ranks, strict=True):
            for tensor in owned_by(layer):
                users.setdefault(id(tensor), set()).update(ranks)
        also_outside = _in_layers_and_outside(self._module, [layer for _, layer in layers])
        for name, tensor in named_tensors(self._module):
            first = self._names.setdefault(id(tensor), (tensor, name))[1]
            self._first_names[name] = first
            # Code outside the layers may use the tensor on any rank, so the layers' ranks are only some of its users.
            if id(tensor) in also_outside:
                self._layer_users[first] = users[id(tensor)]
            elif id(tensor) in users:
                self._in_layers.add(first)
            known = tuple(sorted(users[id(tensor)])) if first in self._in_layers else self._everyone
            self._holders.setdefault(first, known)

    # ------------------------------------------------------------------ questions

    def owners(self, name: str) -> tuple[int, ...]:
        """The ranks that hold the true value of a named parameter or buffer, ascending."""
        return self._holders[self._first_names[name]] if name in self._first_names else self._loss_ranks

    def has(self, name: str) -> bool:
        """Whether this is the first name of a tensor that the map knows."""
        return name in self._holders and self._first_names[name] == name

    def held_everywhere(self, name: str) -> bool:
        """Whether all ranks hold it."""
        return self.owners(name) == self._everyone

    def name_of(self, tensor: Tensor) -> str | None:
        """The first name of a tensor; ``None`` if it was no parameter or buffer of the module."""
        return self._names.get(id(tensor), (tensor, None))[1]

    def also(self, tensor: Tensor, name: str) -> None:
        """A tensor stands for the one with this name, too: a part of it, or the whole that is gathered of parts."""
        self._names[id(tensor)] = tensor, self._first_names.get(name, name)

    def first_name(self, name: str) -> str | None:
        """The first name of the tensor with this name."""
        return self._first_names.get(name)

    def in_layers_alone(self, name: str) -> bool:
        """Whether a parameter belongs to layers, and to no module outside."""
        return self._first_names.get(name) in self._in_layers

    def in_layers_and_outside(self, name: str) -> bool:
        """Whether a parameter belongs to a layer and to a module outside."""
        return self._first_names.get(name) in self._layer_users

    def outside(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters outside the sequence, each once."""
        for name, parameter in self._module.named_parameters():
            if not self.in_layers_alone(name):
                yield name, parameter

    # ------------------------------------------------------------------ what becomes known later

    def learn_users(self, used_by_rank: Sequence[Iterable[str]]) -> set[str]:
        """Give what lies outside the sequence to the ranks that use it, or else to the ranks with the loss.

        Args:
            used_by_rank: for each rank the names of the parameters it has used, and of the modules it has run with a
                dot behind them.

        Returns:
            The names that somebody has used.
        """
        users: dict[str, list[int]] = {}
        for rank, names in enumerate(used_by_rank):
            for name in names:
                users.setdefault(name, []).append(rank)
        for name, ranks in self._layer_users.items():
            users[name] = sorted({*users.get(name, ()), *ranks})
        for name, _ in self.outside():
            self._holders[name] = tuple(users.get(name, self._loss_ranks))
        for prefix, buffer in self._outside_buffers():
            # A buffer is not "used" as a parameter is: it belongs to the ranks that run its module.
            ran = [ranks for name, ranks in users.items() if name.endswith(".") and f"{prefix}.".startswith(name)]
            self._holders[buffer] = tuple(ran[0]) if ran else self._loss_ranks
        return set(users)

    def _outside_buffers(self) -> Iterator[tuple[str, str]]:
        for module_name, module in self._module.named_modules():
            for name, _ in module.named_buffers(recurse=False):
                full = f"{module_name}.{name}" if module_name else name
                if self._first_names.get(full) == full and full not in self._in_layers:
                    yield module_name, full

    def inherit(self, before: HolderMap) -> None:
        """Take over what an earlier division of the same module has learnt about tensors outside the layers."""
        for name, tensor in named_tensors(self._module):
            known = before.name_of(tensor)
            if known is not None and self.has(name) and not self.in_layers_alone(name):
                self._holders[name] = before.owners(known)

    def add_new(self) -> None:
        """Take up parameters and buffers of modules that hooks have added."""
        for name, tensor in named_tensors(self._module):
            first = self._first_names.setdefault(name, self._names.setdefault(id(tensor), (tensor, name))[1])
            self._holders.setdefault(first, self._loss_ranks)

    def correct(self, having: Mapping[str, tuple[int, ...]]) -> None:
        """Set the ranks that hold some names."""
        for name, ranks in having.items():
            self._holders[self._first_names[name]] = ranks

    def give_to_all(self) -> None:
        """Every rank holds everything again."""
        self._holders = dict.fromkeys(self._holders, self._everyone)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def owned_by(layer: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of a layer."""
    yield from layer.parameters()
    yield from layer.buffers()


def _in_layers_and_outside(module: nn.Module, layers: Iterable[nn.Module]) -> set[int]:
    """The parameters, by ``id``, that belong to a layer and to a module that is no part of one."""
    in_layers = {id(part) for layer in layers for part in layer.modules()}
    owned: tuple[set[int], set[int]] = (set(), set())
    for part in module.modules():
        owned[id(part) in in_layers].update(id(parameter) for parameter in part.parameters(recurse=False))
    return owned[0] & owned[1]
