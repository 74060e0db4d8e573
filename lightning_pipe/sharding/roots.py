"""The modules of a rank whose parameters may be divided: the layers of its stages, and the modules outside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from lightning_pipe.intercept.interceptor import outside_modules


class Root(NamedTuple):
    """A module that is divided by itself.

    Args:
        name: its dotted name.
        module: the layer or outside module.
        stage: of the layer; ``None`` outside the layers.
    """

    name: str
    module: nn.Module
    stage: int | None


def roots_of(
    module: nn.Module, layers: Sequence[tuple[str, nn.Module]], stage_layers: Sequence[range], here: Iterable[int]
) -> list[Root]:
    """The layers of this rank and the outside modules, in the same order on all processes that hold them.

    Args:
        module: the user's module.
        layers: its layers with dotted names.
        stage_layers: for each stage its range of layers.
        here: the stages of this rank.
    """
    found = [Root(*layers[number], stage) for stage in sorted(here) for number in stage_layers[stage]]
    outside = outside_modules(module, [layer for _, layer in layers])
    return [*found, *(Root(name, part, None) for name, part in outside)]


def stages_of_parts(
    module: nn.Module, roots: Iterable[Root], layers: Sequence[tuple[str, nn.Module]]
) -> dict[nn.Module, int | None]:
    """The stage of each part of this rank; ``None`` outside the layers, and for modules that contain some.

    Args:
        module: the user's module.
        roots: those of this rank.
        layers: all layers with dotted names.
    """
    of_layers = {part for _, layer in layers for part in layer.modules()}
    found: dict[nn.Module, int | None] = {part: None for part in module.modules() if part not in of_layers}
    return found | {part: root.stage for root in roots for part in root.module.modules()}


def tied(module: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> set[Tensor]:
    """The parameters and buffers that several layers or outside modules have in common."""
    return {tensor for tensor, count in _users(module, layers).items() if count > 1}


def left_whole(module: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> set[nn.Parameter]:
    """The parameters that are not divided over the replicas.

    What several layers or outside modules have in common is summed as a tied weight is, and so is what belongs to none
    of them; recurrent layers keep their weights in a list of their own.
    """
    recurrent = {p for part in module.modules() if isinstance(part, nn.RNNBase) for p in part.parameters()}
    users = _users(module, layers)
    return recurrent | {parameter for parameter in module.parameters() if users[parameter] != 1}


def _users(module: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> Counter[Tensor]:
    """How many layers and outside modules have each parameter and buffer."""
    everything = [layer for _, layer in layers]
    outside = [part for _, part in outside_modules(module, everything)]
    return Counter(tensor for root in (*everything, *outside) for tensor in (*root.parameters(), *root.buffers()))
