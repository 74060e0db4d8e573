"""Where every parameter is expected to be held, told from names alone, before anything has run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_pipe.partition.calls import Layers


class ParameterPlace(NamedTuple):
    """A parameter and the layers beside which it is held.

    Args:
        name: its first name in the module.
        parameter: the parameter.
        inside: indices of the layers that contain it.
        beside: indices of the layers that follow it in the order of registration, one for each of its names outside
            the layers; the last layer where none follows.
    """

    name: str
    parameter: nn.Parameter
    inside: tuple[int, ...]
    beside: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements; 0 for a parameter not yet materialised."""
        return 0 if is_lazy(self.parameter) else self.parameter.numel()


def parameter_places(module: nn.Module, layers: Layers) -> list[ParameterPlace]:
    """The parameters of a module, each once, with their places.

    Where code outside the layers uses a parameter shows only when it runs. Modules are registered in about the order
    in which they run, so an embedding registered before the layers counts as used before them, and a head after them.

    Args:
        module: the whole module.
        layers: the layer sequence.

    Returns:
        One entry per parameter, in the order of ``named_parameters()``.

    Example:
        >>> net = nn.Sequential(nn.Embedding(10, 2), nn.Linear(2, 2), nn.Linear(2, 3))
        >>> [(h.name, h.inside, h.beside) for h in parameter_places(net, [("1", net[1]), ("2", net[2])])][:2]
        [('0.weight', (), (0,)), ('1.weight', (0,), ())]
    """
    index = {name: i for i, (name, _) in enumerate(layers)}
    after = len(layers) - 1
    places: dict[int, tuple[set[int], set[int]]] = {}
    for name, parameter in reversed(list(module.named_parameters(remove_duplicate=False))):
        containing = _containing(name, index)
        after = after if containing is None else containing
        inside, beside = places.setdefault(id(parameter), (set(), set()))
        (beside if containing is None else inside).add(after)
    return [
        ParameterPlace(name, parameter, *(tuple(sorted(place)) for place in places[id(parameter)]))
        for name, parameter in module.named_parameters()
    ]


def places_by_stage(module: nn.Module, layers: Layers, counts: Sequence[int]) -> list[list[ParameterPlace]]:
    """The parameters that each stage is expected to hold; one that several stages hold is in all of their lists.

    Args:
        module: the whole module.
        layers: the layer sequence.
        counts: layers of every stage.

    Returns:
        One list per stage.
    """
    held = parameter_places(module, layers)
    ends = pairwise(accumulate(counts, initial=0))
    return [[one for one in held if any(start <= i < end for i in one.inside + one.beside)] for start, end in ends]


def parameter_costs(module: nn.Module, layers: Layers) -> list[int]:
    """Number of parameters that every layer brings to its stage.

    A parameter shared by layers is charged to the first of them. One outside the layers is charged to the layer that
    follows it, and under several names (tied embeddings) once for each of these places, as it will be held at each.

    Args:
        module: the whole module.
        layers: the layer sequence.

    Returns:
        Parameters per layer; parameters not yet materialised count 0.

    Example:
        >>> net = nn.Sequential(nn.Embedding(10, 2), nn.Linear(2, 2), nn.Linear(2, 3))
        >>> parameter_costs(net, [("1", net[1]), ("2", net[2])])
        [26, 9]
    """
    costs = [0] * len(layers)
    for held in parameter_places(module, layers):
        for place in {*held.inside[:1], *held.beside}:
            costs[place] += held.size
    return costs


def _containing(name: str, index: dict[str, int]) -> int | None:
    parts = name.split(".")
    return next((index[path] for path in accumulate(parts, "{}.{}".format) if path in index), None)
