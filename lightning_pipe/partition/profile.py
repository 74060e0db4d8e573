"""What each layer really costs: measured once on real data, stored, and used to balance from then on."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_pipe.partition.sequence import Layers

OPTIMIZER_FACTOR = 4.0
"""Copies of each parameter that training with Adam holds: weight, gradient and two moments."""


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
        self, names: Sequence[str], by: Literal["time", "memory"], in_flight: int = 1, factor: float = OPTIMIZER_FACTOR
    ) -> list[float]:
        """One cost for every layer; modules outside count with the layer they run beside.

        Args:
            names: the layers in order.
            by: seconds of forward and backward, or bytes of parameters, gradients, optimizer and activations.
            in_flight: micro-batches whose activations are held at once.
            factor: copies of a parameter that training holds.
        """

        def cost(name: str) -> float:
            measured = self.layers[name]
            if by == "time":
                return measured.forward + measured.backward
            return measured.parameter_bytes * factor + measured.saved_bytes * in_flight

        costs = [cost(name) for name in names]
        for name, before in self.beside.items():
            costs[min(max(before - 1, 0), len(costs) - 1)] += cost(name)
        return costs

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
        start = _now(module)
        if repeat == 0:  # the first run warms up, and counts what is kept

            def pack(tensor: Tensor) -> Tensor:
                if not isinstance(tensor, nn.Parameter):
                    saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = forward(*own_args, **own_kwargs)
        else:
            result = forward(*own_args, **own_kwargs)
        middle = _now(module)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if results and (inputs or weights):
            ones = [torch.ones_like(leaf) for leaf in results]
            torch.autograd.grad(results, [*inputs, *weights], ones, allow_unused=True)
        if repeat:
            times.append((middle - start, _now(module) - middle))
    parameter_bytes = sum(parameter.nbytes for parameter in module.parameters())
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = sum(size for place, size in saved.items() if place not in own)
    return LayerCost(min(t[0] for t in times), min(t[1] for t in times), parameter_bytes, kept)


def _copy(leaf: Any) -> Any:
    # Not a leaf of the graph, so that a layer may change its input in place.
    return leaf.detach().clone().requires_grad_(leaf.requires_grad).view_as(leaf) if isinstance(leaf, Tensor) else leaf


def _now(module: nn.Module) -> float:
    if any(parameter.is_cuda for parameter in module.parameters()):
        torch.cuda.synchronize()
    return time.perf_counter()


class ProfileStore:
    """Profiles on disk, one file for each module; the latest batch signature counts.

    Args:
        folder: where; by default ``$LIGHTNING_PIPE_CACHE`` or ``~/.cache/lightning_pipe``.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        chosen = folder or os.environ.get("LIGHTNING_PIPE_CACHE") or Path.home() / ".cache" / "lightning_pipe"
        self._folder = Path(chosen)

    def load(self, module: nn.Module, layers: Layers) -> Profile | None:
        """The profile of a module, or ``None``."""
        path = self.path(module, layers)
        if not path.is_file():
            return None
        stored = json.loads(path.read_text())
        latest = stored["profiles"][stored["latest"]]
        profile = Profile({name: LayerCost(**cost) for name, cost in latest["layers"].items()}, latest["beside"])
        return profile if profile.covers([name for name, _ in layers]) else None

    def save(self, module: nn.Module, layers: Layers, signature: str, profile: Profile) -> Path:
        """Store a profile for a batch signature; returns the file."""
        path = self.path(module, layers)
        stored = json.loads(path.read_text()) if path.is_file() else {"profiles": {}}
        costs = {name: asdict(cost) for name, cost in profile.layers.items()}
        stored["profiles"][signature] = {"layers": costs, "beside": profile.beside}
        stored["latest"] = signature
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(stored, indent=1))
        partial.replace(path)
        return path

    def path(self, module: nn.Module, layers: Layers) -> Path:
        """The file of a module: by its class, and the names and shapes of its parameters."""
        description = [f"{type(module).__module__}.{type(module).__qualname__}"]
        description += [name for name, _ in layers]
        description += [f"{name}{tuple(p.shape)}{p.dtype}" for name, p in module.named_parameters()]
        digest = hashlib.sha256("\n".join(description).encode()).hexdigest()[:16]
        return self._folder / f"{type(module).__name__}-{digest}.json"
