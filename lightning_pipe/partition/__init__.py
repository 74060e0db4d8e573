"""Finds the layers of a module and divides them over stages."""

from lightning_pipe.partition.balancing import balance
from lightning_pipe.partition.cost import AUTO, Balance, divide, imbalance, layer_costs
from lightning_pipe.partition.flops import has_example, layer_flops
from lightning_pipe.partition.holding import ParameterPlace, parameter_costs, parameter_places, places_by_stage
from lightning_pipe.partition.sequence import Layers, find_layers, parameter_count

__all__ = [
    "AUTO",
    "Balance",
    "Layers",
    "ParameterPlace",
    "balance",
    "divide",
    "find_layers",
    "has_example",
    "imbalance",
    "layer_costs",
    "layer_flops",
    "parameter_costs",
    "parameter_count",
    "parameter_places",
    "places_by_stage",
]
