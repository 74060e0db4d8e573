"""Finds the layers of a module and divides them over stages."""

from lightning_pipe.config import Balance
from lightning_pipe.partition.balancing import balance
from lightning_pipe.partition.calls import Layers
from lightning_pipe.partition.cost import AUTO, divide, imbalance, layer_costs
from lightning_pipe.partition.flops import layer_flops
from lightning_pipe.partition.holding import ParameterPlace, parameter_costs, parameter_places, places_by_stage
from lightning_pipe.partition.sequence import find_layers, known_layers, parameter_count

__all__ = [
    "AUTO",
    "Balance",
    "Layers",
    "ParameterPlace",
    "balance",
    "divide",
    "find_layers",
    "imbalance",
    "known_layers",
    "layer_costs",
    "layer_flops",
    "parameter_costs",
    "parameter_count",
    "parameter_places",
    "places_by_stage",
]
