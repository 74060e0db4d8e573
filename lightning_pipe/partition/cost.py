"""What a layer costs, and the division of a module's layers over stages that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from math import isfinite
from typing import Final

from torch import nn

from lightning_pipe.config import Balance
from lightning_pipe.errors import ConfigurationError, PartitionError
from lightning_pipe.partition.balancing import balance as balance_costs
from lightning_pipe.partition.calls import Layers
from lightning_pipe.partition.choice import line
from lightning_pipe.partition.flops import layer_flops
from lightning_pipe.partition.holding import parameter_costs
from lightning_pipe.partition.sequence import find_layers
from lightning_pipe.text import several

AUTO: Final = "auto"
"""By the work that a first batch shows, else by parameters."""


def divide(
    module: nn.Module,
    layers: Layers,
    stages: int,
    balance: Balance = "parameters",
    measured: Sequence[float] | None = None,
) -> list[int]:
    """Divides the layers over the stages.

    Args:
        module: the whole module; its parameters outside the layers are charged to the stages that will hold them.
        layers: the layer sequence, from `find_layers`.
        stages: number of stages.
        balance: ``"parameters"``, ``"flops"`` on the module's example, ``"time"`` or ``"memory"`` as measured, the
            number of layers of every stage, or the cost of a layer as a function of it.
        measured: the cost of every layer, for ``"time"`` and ``"memory"``.

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
    costs = layer_costs(module, layers, balance, measured)
    if costs is not None:
        return balance_costs(costs, stages)
    return _checked(list(balance), len(layers), stages)  # type: ignore[arg-type]


def layer_costs(
    module: nn.Module, layers: Layers, balance: Balance, measured: Sequence[float] | None = None
) -> list[float] | None:
    """The costs that `divide` balances; ``None`` where the numbers of layers are given."""
    if callable(balance):
        return [_called(balance, name, layer) for name, layer in layers]
    if not isinstance(balance, str):
        return None
    if balance in ("parameters", AUTO):
        return [float(cost) for cost in parameter_costs(module, layers)]
    if balance == "flops":
        return layer_flops(module, layers)
    if balance not in ("time", "memory"):
        raise ConfigurationError(
            f"balance={balance!r} is unknown.",
            hint='Use "parameters", "flops", "time", "memory", a list such as [2, 3, 2], or a function of a layer.',
        )
    if measured is None:
        raise ConfigurationError(
            f"balance={balance!r} needs the {balance} of every layer, and it has not been measured for this module.",
            hint='Measure it with `lightning-pipe profile`, use balance="parameters", or pass the costs as a function: '
            "balance=lambda layer: …",
        )
    return list(measured)


def imbalance(costs: Sequence[float], counts: Sequence[int]) -> float:
    """The cost of the largest stage over the mean of all stages; 1 is a perfect balance.

    Example:
        >>> imbalance([1, 2, 3, 2], [2, 2])
        1.25
    """
    ends = accumulate(counts, initial=0)
    stages = [sum(costs[start:end]) for start, end in pairwise(ends)]
    return max(stages) * len(stages) / sum(stages) if sum(stages) else 1.0


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
    ways = [f"Use stages={len(layers)} or fewer on {len(layers)} ranks or fewer."] if len(layers) > 1 else []
    with suppress(PartitionError):
        found = find_layers(module, None, stages)
        ways.append(f"If these modules run one after the other: {line(module, found)}.")
    return PartitionError(
        f"{several(len(layers), 'layer')} ({shown}) cannot fill {several(stages, 'stage')}: each takes at least one.",
        hint=" ".join(ways) or "Train it on one device.",
    )
