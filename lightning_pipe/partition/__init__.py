"""Finds the layers of a module and divides them over stages."""

from lightning_pipe.partition.balancing import balance
from lightning_pipe.partition.cost import Balance, divide, imbalance, layer_costs
from lightning_pipe.partition.holding import Held, held_by_stages, held_parameters, parameter_costs
from lightning_pipe.partition.profile import LayerCost, Profile, ProfileStore
from lightning_pipe.partition.sequence import Layers, find_layers, parameter_count

__all__ = [
    "Balance",
    "Held",
    "LayerCost",
    "Layers",
    "Profile",
    "ProfileStore",
    "balance",
    "divide",
    "find_layers",
    "held_by_stages",
    "held_parameters",
    "imbalance",
    "layer_costs",
    "parameter_costs",
    "parameter_count",
]
