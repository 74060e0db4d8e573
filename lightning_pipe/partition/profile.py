"""What each layer really costs: measured once on real data, stored, and used to balance from then on."""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_pipe.partition.sequence import Layers
from lightning_pipe.torch_internals import tree_leaves, tree_map

OPTIMIZER_FACTOR = 4.0
"""Copies of each parameter that training with Adam holds: weight, gradient and two moments."""

PROFILES = 16
"""Batch signatures for which the costs of a module are kept."""


@dataclass(frozen=True)
class LayerCost:
    """One layer on one micro-batch.

    Args:
        forward: seconds.
        backward: seconds.
        parameter_bytes: bytes of its parameters.
        saved_bytes: bytes that its forward pass keeps for the backward pass.
    """

    forward: float
    backward: float
    parameter_bytes: int
    saved_bytes: int


@dataclass
class Profile:
    """The costs of the layers of a module, by name; of modules outside the sequence too.

    Args:
        layers: for each layer or outside module its cost.
        beside: for each outside module the number of layers that had been called before it.
    """

    layers: dict[str, LayerCost] = field(default_factory=dict)
    beside: dict[str, int] = field(default_factory=dict)

    def costs(
        self,
        names: Sequence[str],
        by: Literal["time", "memory"],
        in_flight: int = 1,
        *,
        recompute: bool = False,
        factor: float = OPTIMIZER_FACTOR,
    ) -> list[float]:
        """One cost for every layer; modules outside count with the layer they run beside.

        Args:
            names: the layers in order.
            by: seconds of forward and backward, or bytes of parameters, gradients, optimizer and activations.
            in_flight: micro-batches whose activations are held at once.
            recompute: whether forward passes run twice.
            factor: copies of a parameter that training holds.
        """

        def cost(name: str) -> float:
            measured = self.layers[name]
            if by == "time":
                return measured.forward * (2 if recompute else 1) + measured.backward
            return measured.parameter_bytes * factor + measured.saved_bytes * in_flight

        costs = [cost(name) for name in names]
        for name, before in self.beside.items():
            costs[min(max(before - 1, 0), len(costs) - 1)] += cost(name)
        return costs

    def stage_times(self, names: Sequence[str], counts: Sequence[int]) -> tuple[list[float], list[float]]:
        """Seconds of every stage's forward and backward pass; modules outside count with the layer they run beside.

        Args:
            names: the layers in order.
            counts: layers of every stage.
        """
        forward = [self.layers[name].forward for name in names]
        backward = [self.layers[name].backward for name in names]
        for name, before in self.beside.items():
            place = min(max(before - 1, 0), len(names) - 1)
            forward[place] += self.layers[name].forward
            backward[place] += self.layers[name].backward
        ends = list(pairwise(accumulate(counts, initial=0)))
        return [sum(forward[start:end]) for start, end in ends], [sum(backward[start:end]) for start, end in ends]

    def covers(self, names: Sequence[str]) -> bool:
        """Whether every layer has been measured."""
        return all(name in self.layers for name in names)


def measure(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], repeats: int = 3
) -> LayerCost:
    """Time a layer alone, forward and backward, on real input.

    Gradients are not accumulated and the arguments not changed; random state and buffers are the caller's to protect.

    Args:
        module: the layer, for its parameters.
        forward: its forward.
        args: the arguments it was called with.
        kwargs: the keyword arguments.
        repeats: the fastest of so many counts.
    """
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    times: list[tuple[float, float]] = []
    saved: dict[int, int] = {}
    for repeat in range(repeats + 1):
        own_args, own_kwargs = tree_map(_copy, (args, dict(kwargs)))
        inputs = [
            leaf for leaf in tree_leaves((own_args, own_kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        start = settled()
        if repeat == 0:  # the first run warms up, and counts what is kept

            def pack(tensor: Tensor) -> Tensor:
                if not isinstance(tensor, nn.Parameter):
                    saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = forward(*own_args, **own_kwargs)
        else:
            result = forward(*own_args, **own_kwargs)
        middle = settled()
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if results and (inputs or weights):
            ones = [torch.ones_like(leaf) for leaf in results]
            torch.autograd.grad(results, [*inputs, *weights], ones, allow_unused=True)
        if repeat:
            times.append((middle - start, settled() - middle))
    parameter_bytes = sum(parameter.nbytes for parameter in module.parameters())
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = sum(size for place, size in saved.items() if place not in own)
    return LayerCost(min(t[0] for t in times), min(t[1] for t in times), parameter_bytes, kept)


def _copy(leaf: Any) -> Any:
    # Not a leaf of the graph, so that a layer may change its input in place.
    return leaf.detach().clone().requires_grad_(leaf.requires_grad).view_as(leaf) if isinstance(leaf, Tensor) else leaf


def settled() -> float:
    """The host's clock when the GPU has done what it was given: before, a reading would time launches."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()


def cache_path(module: nn.Module, also: Sequence[str], folder: str | os.PathLike[str] | None = None) -> Path:
    """The file for what is measured of a module: another module, other options and other code have another one.

    Args:
        module: the module.
        also: what else the measurements depend on.
        folder: where; by default ``$LIGHTNING_PIPE_CACHE`` or ``~/.cache/lightning_pipe``.
    """
    chosen = folder or os.environ.get("LIGHTNING_PIPE_CACHE") or Path.home() / ".cache" / "lightning_pipe"
    kinds = [f"{name} {type(part).__qualname__}({part.extra_repr()})" for name, part in module.named_modules()]
    parameters = [f"{name}{tuple(p.shape)}{p.dtype}" for name, p in module.named_parameters()]
    code = [text for kind in dict.fromkeys(map(type, module.modules())) for text in _code_of(kind)]
    description = [type(module).__module__, *also, *kinds, *parameters, *code]
    digest = hashlib.sha256("\n".join(description).encode()).hexdigest()[:16]
    return Path(chosen) / f"{type(module).__name__}-{digest}.json"


def _code_of(kind: type) -> list[str]:
    """What tells that the methods of a class of the user's have been edited."""
    if kind.__module__.startswith("torch."):
        return []
    methods = [(name, value.__code__) for name, value in vars(kind).items() if isinstance(value, FunctionType)]
    return [f"{name} {code.co_code.hex()} {code.co_names}" for name, code in methods]


def write_atomically(path: Path, text: str) -> None:
    """Write what has been measured; a folder that cannot be written to costs the measurements, not the run."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        warnings.warn(f"The costs of the layers cannot be stored: {error}.", stacklevel=3)


class ProfileStore:
    """The profiles of one module on disk, by batch signature; the one used last counts.

    A module is known by its class, its modules with their options, and the names, shapes and types of its parameters,
    as they are when the store is made.

    Args:
        module: the module.
        layers: its layer sequence.
        conditions: what else the costs depend on, such as the device.
        folder: where; by default ``$LIGHTNING_PIPE_CACHE`` or ``~/.cache/lightning_pipe``.

    Attributes:
        path: the file.
        signatures: those of the profiles that there were when `load` was called; the one used last comes last.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Layers,
        conditions: Sequence[str] = (),
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self._names = [name for name, _ in layers]
        self.path = cache_path(module, [*self._names, *conditions], folder)
        self.signatures: list[str] = []

    def load(self) -> Profile | None:
        """The profile used last, or ``None``."""
        profiles = self._read()
        self.signatures = list(profiles)
        return profiles[self.signatures[-1]] if profiles else None

    def save(self, signature: str, profile: Profile | None = None) -> None:
        """Let the profile of a batch signature be the one used last; a new one, or else the one that is there."""
        profiles = self._read()
        known = profiles.pop(signature, None)
        if profile is None and known is None:
            return
        profiles[signature] = profile or known  # type: ignore[assignment]
        for oldest in list(profiles)[:-PROFILES]:
            del profiles[oldest]
        content = {signature: asdict(profile) for signature, profile in profiles.items()}
        write_atomically(self.path, json.dumps(content))

    def _read(self) -> dict[str, Profile]:
        try:
            stored = json.loads(self.path.read_text())
            profiles = {signature: _profile(costs) for signature, costs in stored.items()}
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            warnings.warn(f"{self.path} cannot be read, its measurements are ignored: {error!r}.", stacklevel=2)
            return {}
        return {signature: profile for signature, profile in profiles.items() if profile.covers(self._names)}


def _profile(stored: Mapping[str, Any]) -> Profile:
    layers = {name: LayerCost(**cost) for name, cost in stored["layers"].items()}
    return Profile(layers, {name: int(before) for name, before in stored["beside"].items()})
