"""The profile of a module: its layers with their parameters, figures that are stored, and estimated ones."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FunctionType

from torch import nn

from lightning_pipe.config import Sharding
from lightning_pipe.partition import Layers, parameter_places
from lightning_pipe.planning.cost_profile import CostProfile, LayerSizes, SizeCosts, TiedSizes
from lightning_pipe.planning.division import Division
from lightning_pipe.simulate.link import Link

_FLOPS, _BANDWIDTH, _LATENCY = 1e12, 1e10, 5e-5
"""Of an imaginary device, in FLOP/s, byte/s and seconds: only the proportion of estimated times has a meaning."""


def without_times(module: nn.Module, layers: Layers, division: Division | None = None) -> CostProfile:
    """A profile of layers and parameters alone, for whoever measures or estimates the rest; messages are guessed.

    Parameters outside the layers count at each layer that brings them to its stage.

    Args:
        module: the module.
        layers: its layer sequence.
        division: what tensor ranks divide.
    """
    numbers, sizes, frozen = [0] * len(layers), [0] * len(layers), [0] * len(layers)
    tied: dict[tuple[int, ...], TiedSizes] = {}
    for held in parameter_places(module, layers):
        places = tuple(sorted({*held.inside, *held.beside}))
        size = (division or Division()).size(held)
        still = 0 if held.parameter.requires_grad else size
        for place in places:
            numbers[place] += held.size
            sizes[place] += size
            frozen[place] += still
        if len(places) > 1:
            before = tied.get(places, TiedSizes(places, 0))
            tied[places] = TiedSizes(places, before.parameter_bytes + size, before.frozen_bytes + still)
    names = (name for name, _ in layers)
    return CostProfile(
        type(module).__name__,
        tuple(LayerSizes(*each) for each in zip(names, numbers, sizes, frozen, strict=True)),
        {},
        Link(_LATENCY, 1 / _BANDWIDTH),
        Link(_LATENCY, 1 / _BANDWIDTH),
        tied=tuple(tied[places] for places in sorted(tied)),
    )


def of_module(profile: CostProfile, module: CostProfile) -> CostProfile:
    """A profile of a module, with the parameters that are frozen now.

    Args:
        profile: measured.
        module: what `without_times` says of the module.

    Raises:
        ConfigurationError: it is of another.
    """
    profile.check_layers([layer.name for layer in module.layers], [layer.parameters for layer in module.layers])
    return replace(profile, layers=module.layers, tied=module.tied)


def profile_path(module: nn.Module, layers: Layers) -> Path:
    """The file that has what `lightning-pipe profile` has measured of a module as it is now.

    It is in ``$LIGHTNING_PIPE_CACHE``, by default ``~/.cache/lightning_pipe``.
    Another module, other options and other code have another file. A module is known by its class, its modules with
    their options, and the names, shapes and types of its parameters. Where the class is imported from does not count:
    a script that runs and a command that imports it mean the same.

    Args:
        module: the module.
        layers: its layer sequence.
    """
    folder = os.environ.get("LIGHTNING_PIPE_CACHE") or Path.home() / ".cache" / "lightning_pipe"
    kinds = [f"{name} {type(part).__qualname__}({part.extra_repr()})" for name, part in module.named_modules()]
    parameters = [f"{name}{tuple(p.shape)}{p.dtype}" for name, p in module.named_parameters()]
    code = [text for kind in dict.fromkeys(map(type, module.modules())) for text in _code_of(kind)]
    description = ["costs", *(name for name, _ in layers), *kinds, *parameters, *code]
    digest = hashlib.sha256("\n".join(description).encode()).hexdigest()[:16]
    return Path(folder) / f"{type(module).__name__}-{digest}.profile.json"


def _code_of(kind: type) -> list[str]:
    """What tells that the methods of a class of the user's have been edited."""
    if kind.__module__.startswith("torch."):
        return []
    methods = [(name, value.__code__) for name, value in vars(kind).items() if isinstance(value, FunctionType)]
    return [f"{name} {code.co_code.hex()} {code.co_names}" for name, code in methods]


def stored(module: nn.Module, layers: Layers, conditions: Mapping[str, str]) -> CostProfile | None:
    """The profile in this file, with the parameters that are frozen now; ``None`` if there is none.

    Args:
        module: the module.
        layers: its layer sequence.
        conditions: that it must have been measured under.

    Raises:
        ConfigurationError: it cannot be read, or was measured under others.
    """
    if not (path := profile_path(module, layers)).exists():
        return None
    profile = CostProfile.load(path)
    profile.check(conditions)
    return of_module(profile, without_times(module, layers))


def estimated(module: nn.Module, layers: Layers) -> CostProfile:
    """A profile from parameters alone: two FLOP for each parameter forward, twice as many backward.

    Right for matrix products, which is most of a transformer; an embedding's rows are looked up, so parameters of
    modules outside the layers count for memory alone. Activations are not known, and taken for none.

    Args:
        module: the module; its parameters may be without values.
        layers: its layer sequence.
    """
    own: Sequence[int] = [sum(parameter.numel() for parameter in layer.parameters()) for _, layer in layers]
    forward = tuple(2.0 * number / _FLOPS for number in own)
    backward = tuple(2 * each for each in forward)
    none = (0.0,) * len(layers)
    costs = SizeCosts(forward, backward, tuple(each / 2 for each in backward), none, none)
    return replace(without_times(module, layers), sizes={1: costs}, conditions={"source": "parameters"})


def of_process(
    module: nn.Module, layers: Layers, sharding: Sharding, tensor: int, measured: CostProfile | None = None
) -> CostProfile:
    """The costs of a module on one of the processes that compute each layer together.

    Args:
        module: the module; its parameters may be without values.
        layers: its layer sequence.
        sharding: ``shard_optimizer``.
        tensor: how many processes.
        measured: on one process; ``None``: estimated from parameters.

    Raises:
        ConfigurationError: these are of another module.
    """
    costs = (estimated(module, layers) if measured is None else measured).over_tensor_ranks(tensor)
    division = Division.before_run(module, layers, sharding, tensor)
    return of_module(costs, without_times(module, layers, division))
