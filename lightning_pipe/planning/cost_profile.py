"""What a module costs on a machine: measured, and kept in one readable file, or made of published figures."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.simulate.link import Link
from lightning_pipe.version import __version__

FORMAT = "lightning-pipe profile 1"
"""First entry of every file; the number changes when older files cannot be read any more."""

SHAPES = "shapes"
"""The condition that says what a sample of the input is like."""

MOMENTS = 2
"""Copies of each parameter that Adam keeps as its state."""


@dataclass(frozen=True)
class SizeCosts:
    """The layers on micro-batches of one size; sequences have one number per layer.

    Args:
        forward: seconds.
        backward: seconds.
        backward_weight: seconds of its part for the weights, where the halves of a backward pass run apart.
        backward_input: seconds of its part for the input there; empty: what the weights' part leaves of ``backward``.
            The halves may take longer than the whole. The first stage has no such part: nothing waits for it.
        saved_bytes: kept for the backward pass; what several layers keep, as the result of one and the input of the
            next, counts at one of them.
        boundary_bytes: of the activation that a layer hands to the next.
        stage_forward: seconds that a forward pass of a stage takes besides its layers.
        stage_backward: the same for a backward pass.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_weight: tuple[float, ...]
    saved_bytes: tuple[float, ...]
    boundary_bytes: tuple[float, ...]
    stage_forward: float = 0.0
    stage_backward: float = 0.0
    backward_input: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.backward_input:
            rest = tuple(whole - weight for whole, weight in zip(self.backward, self.backward_weight, strict=True))
            object.__setattr__(self, "backward_input", rest)

    def mixed(self, other: SizeCosts, share: float) -> SizeCosts:
        """The costs on the line from these (``share=0``) to another size's (``share=1``); no cost falls below zero."""

        def mix(one: Any, two: Any) -> Any:
            if isinstance(one, tuple):
                return tuple(mix(a, b) for a, b in zip(one, two, strict=True))
            return max(0.0, one + share * (two - one))

        return SizeCosts(*(mix(getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__))

    def scaled(self, factor: float) -> SizeCosts:
        """Larger by a factor in every respect."""
        none = (0.0,) * len(self.forward)
        return SizeCosts(none, none, none, none, none).mixed(self, factor)


@dataclass(frozen=True)
class LayerSizes:
    """What does not depend on the micro-batch.

    Args:
        name: dotted name of the layer.
        parameters: how many it has, with those outside the sequence that run beside it. What layers have in common
            counts at each of them; see `TiedSizes`.
        parameter_bytes: their bytes.
        frozen_bytes: of these, the bytes of parameters that are not trained: they get no gradients and no updates.
    """

    name: str
    parameters: int
    parameter_bytes: int
    frozen_bytes: int = 0


@dataclass(frozen=True)
class TiedSizes:
    """Parameters that layers have in common, or that are used beside several of them, as tied embeddings are.

    Args:
        layers: indices of these layers.
        parameter_bytes: their bytes, once.
        frozen_bytes: of these, the bytes of parameters that are not trained.
    """

    layers: tuple[int, ...]
    parameter_bytes: int
    frozen_bytes: int = 0


@dataclass(frozen=True)
class CostProfile:
    """The costs of one module on one machine.

    Args:
        module: name of the module's class.
        layers: its layers in order.
        sizes: samples of a micro-batch -> what the layers cost then.
        message: from one rank to another through the engine.
        all_reduce: for `Link.all_reduce`.
        overhead: seconds of the engine for each compute action of a rank.
        batch: seconds of a batch besides its actions.
        step_per_byte: seconds of an optimizer step for each byte of parameters.
        tied: parameters whose gradients are summed over the ranks of all their layers.
        conditions: what the figures depend on: device, threads, versions, shapes. Only those that are there count.

    Raises:
        ConfigurationError: a size has not one number for each layer.

    Example:
        >>> costs = SizeCosts((0.01,) * 4, (0.02,) * 4, (0.01,) * 4, (1e6,) * 4, (1e5,) * 4)
        >>> layers = tuple(LayerSizes(f"h.{i}", 1000, 4000) for i in range(4))
        >>> CostProfile("Net", layers, {1: costs}).at(3).forward[0]
        0.03
    """

    module: str
    layers: tuple[LayerSizes, ...]
    sizes: Mapping[int, SizeCosts]
    message: Link = field(default_factory=Link)
    all_reduce: Link = field(default_factory=Link)
    overhead: float = 0.0
    batch: float = 0.0
    step_per_byte: float = 0.0
    tied: tuple[TiedSizes, ...] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for costs in self.sizes.values():
            for name, numbers in vars(costs).items():
                if isinstance(numbers, tuple) and len(numbers) != len(self.layers):
                    raise ConfigurationError(
                        f"{name} needs {len(self.layers)} numbers, one for each layer, got {len(numbers)}."
                    )

    def at(self, samples: int) -> SizeCosts:
        """The costs for micro-batches of a number of samples, on the line through the two nearest measured sizes.

        Beyond the largest size the line goes on; with one size alone, costs are in proportion to samples.
        """
        known = sorted(self.sizes)
        if samples in self.sizes:
            return self.sizes[samples]
        if len(known) == 1:
            return self.sizes[known[0]].scaled(samples / known[0])
        right = min(max(bisect_left(known, samples), 1), len(known) - 1)
        low, high = known[right - 1], known[right]
        return self.sizes[low].mixed(self.sizes[high], (samples - low) / (high - low))

    def over_tensor_ranks(self, members: int) -> CostProfile:
        """The costs of one of several processes that compute each layer together, as far as they can be told.

        After Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3: each computes and keeps its part, and two sums
        of what a layer hands on are awaited in a forward pass, two of their gradients in a backward pass. Activations
        between layers are whole. All parameters are taken for divided; `of_process` has those of a module.

        Args:
            members: how many processes.
        """
        if members == 1:
            return self

        def part(sizes: Any) -> Any:
            own, frozen = sizes.parameter_bytes // members, sizes.frozen_bytes // members
            return replace(sizes, parameter_bytes=own, frozen_bytes=frozen)

        sizes = {size: self._of_a_part(costs, members) for size, costs in self.sizes.items()}
        return replace(self, layers=tuple(map(part, self.layers)), sizes=sizes, tied=tuple(map(part, self.tied)))

    def _of_a_part(self, costs: SizeCosts, members: int) -> SizeCosts:
        # the last layer hands on nothing: its sums are as large as those of the one before it
        handed = [*costs.boundary_bytes[:-1], max(costs.boundary_bytes[-2:])]
        sums = [2 * float(self.all_reduce.all_reduce(size, members)) for size in handed]

        def over(values: Sequence[float], beside: Sequence[float]) -> tuple[float, ...]:
            return tuple(value / members + more for value, more in zip(values, beside, strict=True))

        none = [0.0] * len(sums)
        kept = [min(*each) for each in zip(costs.saved_bytes, handed, strict=True)]
        inside = [saved - whole for saved, whole in zip(costs.saved_bytes, kept, strict=True)]
        return replace(
            costs,
            forward=over(costs.forward, sums),
            backward=over(costs.backward, sums),
            backward_weight=over(costs.backward_weight, none),
            backward_input=over(costs.backward_input, sums),
            saved_bytes=over(inside, kept),
        )

    def layer_costs(self, by: Literal["time", "memory"], in_flight: int = 1, *, recompute: bool = False) -> list[float]:
        """One cost for every layer, to balance stages by, on micro-batches of the smallest measured size.

        Args:
            by: seconds of forward and backward, or bytes of parameters, gradients, optimizer and activations.
            in_flight: micro-batches whose activations are held at once; with recomputation those of one are.
            recompute: whether forward passes run twice.
        """
        at, in_flight = self.sizes[min(self.sizes)], 1 if recompute else in_flight
        if by == "time":
            return [(1 + recompute) * f + b for f, b in zip(at.forward, at.backward, strict=True)]
        return [
            layer.parameter_bytes + (1 + MOMENTS) * (layer.parameter_bytes - layer.frozen_bytes) + in_flight * saved
            for layer, saved in zip(self.layers, at.saved_bytes, strict=True)
        ]

    def check(self, now: Mapping[str, str]) -> None:
        """Refuse figures that were measured under other conditions.

        Raises:
            ConfigurationError: with every condition that differs.
        """
        differing = [
            f"{name} {self.conditions[name]} in the profile, {value} now"
            for name, value in now.items()
            if name in self.conditions and self.conditions[name] != value
        ]
        if differing:
            raise ConfigurationError(
                f"The profile of {self.module} was measured under other conditions: {'; '.join(differing)}.",
                hint="Measure again with `lightning-pipe profile`, or plan with it without starting the run here.",
            )

    def check_layers(self, names: Sequence[str], parameters: Sequence[int]) -> None:
        """Refuse figures of another module.

        Raises:
            ConfigurationError: with the first layer that differs.
        """
        own = [(layer.name, layer.parameters) for layer in self.layers]
        theirs = list(zip(names, parameters, strict=True))
        if own == theirs:
            return
        if len(own) != len(theirs):
            what = f"{len(own)} layers in the profile, {len(theirs)} in the module"
        else:
            (a, m), (b, n) = next(pair for pair in zip(own, theirs, strict=True) if pair[0] != pair[1])
            what = f"layer {a} with {m:,} parameters in the profile, {b} with {n:,} in the module"
        raise ConfigurationError(
            f"The profile of {self.module} is of another module: {what}.",
            hint="Measure this one with `lightning-pipe profile`.",
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, which is replaced: who reads it meanwhile finds what was there before, or all of it.

        Raises:
            OSError: it cannot be written.
        """
        content = {"format": FORMAT, **asdict(self)}
        content["sizes"] = {str(size): asdict(costs) for size, costs in self.sizes.items()}
        path = Path(path)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostProfile:
        """Read a file.

        Raises:
            ConfigurationError: it cannot be read, is of another format, or was measured by another version.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            found = content.pop("format")
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{path} is no profile that can be read: {error!r}.") from error
        if found != FORMAT:
            raise ConfigurationError(
                f"{path} has the format {found!r}, this version of the package reads {FORMAT!r}.",
                hint="Measure again with `lightning-pipe profile`.",
            )
        try:
            profile = _made(content)
        except (AttributeError, KeyError, TypeError, ValueError, ConfigurationError) as error:
            raise ConfigurationError(f"{path} is no profile that can be read: {error}") from error
        # What the engine takes for an action changes with its version, on whatever machine the file is read.
        profile.check({"lightning_pipe": __version__})
        return profile


def _made(content: dict[str, Any]) -> CostProfile:
    layers = tuple(LayerSizes(**layer) for layer in content.pop("layers"))
    sizes = {int(size): SizeCosts(**_with_tuples(costs)) for size, costs in content.pop("sizes").items()}
    tied = tuple(TiedSizes(**_with_tuples(each)) for each in content.pop("tied"))
    message, all_reduce = (Link(**content.pop(name)) for name in ("message", "all_reduce"))
    return CostProfile(layers=layers, sizes=sizes, message=message, all_reduce=all_reduce, tied=tied, **content)


def _with_tuples(content: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in content.items()}


def merged(profiles: Sequence[CostProfile]) -> CostProfile:
    """The median of what several processes have measured at the same time: one that was disturbed does not count."""

    def middle(values: Sequence[Any]) -> Any:
        if isinstance(values[0], tuple):
            return tuple(median(each) for each in zip(*values, strict=True))
        return median(values)

    names = SizeCosts.__dataclass_fields__
    sizes = {
        size: SizeCosts(*(middle([getattr(each.sizes[size], name) for each in profiles]) for name in names))
        for size in profiles[0].sizes
    }
    numbers = {name: middle([getattr(each, name) for each in profiles]) for name in ("overhead", "step_per_byte")}
    return replace(profiles[0], sizes=sizes, **numbers)
