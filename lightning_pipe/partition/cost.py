"""What a layer costs, and the division of a module's layers over stages that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Literal

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_pipe.errors import ConfigurationError, PartitionError
from lightning_pipe.partition.balancing import balance as balance_costs
from lightning_pipe.partition.sequence import Layers, finer_path
from lightning_pipe.text import several

Balance = Literal["parameters", "time", "memory"] | Sequence[int] | Callable[[nn.Module], float]


def divide(module: nn.Module, layers: Layers, stages: int, balance: Balance = "parameters") -> list[int]:
    """Divides the layers over the stages.

    Args:
        module: the whole module; its parameters outside the layers are charged to the stages that will hold them.
        layers: the layer sequence, from `find_layers`.
        stages: number of stages.
        balance: ``"parameters"``, the number of layers of every stage, or the cost of a layer as a function of it.

    Returns:
        Number of layers of every stage, each at least 1.

    Raises:
        PartitionError: there are fewer layers than stages, or the numbers given do not add up.
        ConfigurationError: costs are asked for that have not been measured.

    Example:
        >>> net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
        >>> divide(net, [(str(i), layer) for i, layer in enumerate(net)], stages=2)
        [2, 3]
    """
    if len(layers) < stages:
        raise _too_few_layers(module, layers, stages)
    if callable(balance):
        return balance_costs([_called(balance, name, layer) for name, layer in layers], stages)
    if not isinstance(balance, str):
        return _checked(list(balance), len(layers), stages)
    if balance == "parameters":
        return balance_costs(parameter_costs(module, layers), stages)
    if balance in ("time", "memory"):
        raise ConfigurationError(
            f"balance={balance!r} needs the {balance} of every layer, and it has not been measured for this module.",
            hint='Use balance="parameters", or pass the costs as a function: balance=lambda layer: …',
        )
    raise ConfigurationError(
        f"balance={balance!r} is unknown.",
        hint='Use "parameters", "time", "memory", a list such as [2, 3, 2], or a function of a layer.',
    )


def parameter_costs(module: nn.Module, layers: Layers) -> list[int]:
    """Number of parameters that every layer brings to its stage.

    A parameter shared by layers is charged to the first of them. One outside the layers is charged to the layer
    registered after it, or to the last one where none is; under several names (tied embeddings) it is charged once for
    each of these places, as it will be held at each.

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
    position = {
        id(parameter): i for i, (_, layer) in reversed(list(enumerate(layers))) for parameter in layer.parameters()
    }
    charged: set[tuple[int, int]] = set()
    following = list(_following_layer(module, layers))
    for (_, parameter), after in zip(module.named_parameters(remove_duplicate=False), following, strict=True):
        place = position.get(id(parameter), after)
        if (id(parameter), place) not in charged and not is_lazy(parameter):
            charged.add((id(parameter), place))
            costs[place] += parameter.numel()
    return costs


def _following_layer(module: nn.Module, layers: Layers) -> list[int]:
    """For every named parameter, repeated ones included, the index of the layer that holds or follows it."""
    index = {name: i for i, (name, _) in enumerate(layers)}
    following: list[int] = []
    after = len(layers) - 1
    for name, _ in reversed(list(module.named_parameters(remove_duplicate=False))):
        parts = name.split(".")
        held = next((index[p] for p in (".".join(parts[:n]) for n in range(len(parts) + 1)) if p in index), None)
        after = after if held is None else held
        following.append(after)
    return following[::-1]


def _called(cost: Callable[[nn.Module], float], name: str, layer: nn.Module) -> float:
    value: object = cost(layer)
    if not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise PartitionError(
            f"balance returned {value!r} for layer {name!r} ({type(layer).__name__}).",
            hint="The cost of a layer is a finite number that is not negative.",
        )
    return value


def _checked(counts: list[int], layers: int, stages: int) -> list[int]:
    even = balance_costs([1] * layers, stages)
    remedy = f'Use balance={even}, or balance="parameters" to have it worked out.'
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in counts):
        raise PartitionError(f"balance={counts}: every stage takes a whole number of layers, at least 1.", hint=remedy)
    if len(counts) != stages:
        raise PartitionError(
            f"balance={counts} is for {several(len(counts), 'stage')}, but there are {several(stages, 'stage')}.",
            hint=remedy,
        )
    if sum(counts) != layers:
        total = f"{' + '.join(map(str, counts))} = {sum(counts)}"
        raise PartitionError(f"balance={counts}: {total}, but there are {several(layers, 'layer')}.", hint=remedy)
    return counts


def _too_few_layers(module: nn.Module, layers: Layers, stages: int) -> PartitionError:
    names = [name for name, _ in layers]
    shown = ", ".join(names if len(names) <= 6 else [*names[:3], "…", names[-1]])
    finer = finer_path(module, layers)
    return PartitionError(
        f"{several(len(layers), 'layer')} ({shown}) cannot fill {several(stages, 'stage')}: each takes at least one.",
        hint=f"Use stages={len(layers)} or fewer"
        + (f', or cut inside the layers if they run one after the other: layers="{finer}".' if finer else "."),
    )
