"""Finds that an optimizer joins numbers of several parameters, which each rank would do for its own alone.

The first steps of a class that is not torch's are tried on copies of a few small parameters. Several tries differ in
the weights and the gradient of one of them: where that changes the update of another, the optimizer joins them. Values,
gradients and rates are made for it: real ones may be zero, or too small for a difference to show.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.local_parts import is_divided, local
from lightning_pipe.patches import after_closure
from lightning_pipe.torch_internals import tree_leaves

MOST = 8
"""Parameters on which an optimizer is tried: at most two vectors and two matrices of a group."""
_RATE = 1.0
_STEPS = 8
"""A rate that is estimated for all parameters (Prodigy, D-Adaptation) moves none of them in the first steps."""
_CHANGES = (1e9, float("nan"))
"""Factors of a gradient: one goes over every limit, one shows decisions by what is not finite."""


class Mixing:
    """Tries the first real step of an optimizer, and none afterwards.

    Args:
        optimizer: the optimizer; torch's own treat every parameter by itself and are not tried.
        names: of its parameters, by ``id``.

    Attributes:
        done: whether nothing is to be tried any more.

    Raises:
        ConfigurationError: from the step: it joins parameters, and two of them are named; or it cannot be tried.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._names = names
        self.done = f"{type(optimizer).__module__}.".startswith("torch.optim.")
        self.remove = optimizer.register_step_pre_hook(self._before).remove

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        def once() -> None:
            if not self.done and (chosen := _chosen(optimizer, self._names)):
                self.done = True
                check(optimizer, chosen)

        return None if self.done else after_closure(args, kwargs, once)


def check(optimizer: Optimizer, chosen: Mapping[str, nn.Parameter]) -> None:
    """Try the step of an optimizer on copies.

    Args:
        optimizer: stays as it is.
        chosen: parameters that have gradients, by their names.

    Raises:
        ConfigurationError: the step joins parameters, or cannot be tried.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.ones(2)
        >>> check(torch.optim.AdamW([weight]), {"weight": weight})
    """
    kind = type(optimizer).__name__
    try:
        usual = _tried(optimizer, chosen, None, 1.0)
        for changed in chosen:
            for factor in _CHANGES:
                other = _tried(optimizer, chosen, changed, factor)
                for name, expected in usual.items():
                    if name != changed and not torch.allclose(expected, other[name], 0.0, 0.0, equal_nan=True):
                        raise ConfigurationError(
                            f"{kind}.step joins numbers of several parameters: with another gradient of '{changed}' it "
                            f"updates '{name}' differently. On a pipeline each rank would join those of its own layers "
                            "alone.",
                            hint="Use an optimizer that treats every parameter by itself, such as AdamW or SGD; for a "
                            "limit on the norm of all gradients Trainer(gradient_clip_val=…).",
                        )
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"Whether {kind}.step joins numbers of several parameters could not be tried on copies of "
            f"{', '.join(repr(name) for name in chosen)}: {error!r}.",
            hint="Use an optimizer that can be copied (copy.deepcopy of its attributes), such as AdamW or SGD.",
        ) from error


def _chosen(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, nn.Parameter]:
    """A few small parameters of every group, with the names that errors tell."""
    known = [
        (number, parameter.ndim > 1, parameter.numel(), names[id(parameter)], parameter)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if id(parameter) in names and parameter.grad is not None
    ]
    known.sort(key=lambda each: each[:3])
    pairs = [list(alike)[:2] for _, alike in groupby(known, key=lambda each: each[:2])]
    return {name: parameter for *_, name, parameter in [each for pair in pairs for each in pair][:MOST]}


def _tried(
    optimizer: Optimizer, chosen: Mapping[str, nn.Parameter], changed: str | None, factor: float
) -> dict[str, Tensor]:
    """What the steps of a copy make of copies of the parameters, and of the numbers in its groups.

    Args:
        optimizer: the optimizer.
        chosen: its parameters by name.
        changed: the one that has other weights and another gradient.
        factor: of the gradient.
    """
    devices = {parameter.device for parameter in chosen.values() if parameter.device.type != "cpu"}
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(0)  # what draws numbers draws the same in all tries
        copies = {name: _like(parameter) for name, parameter in chosen.items()}
        memo: dict[int, Any] = {id(parameter): copies[name] for name, parameter in chosen.items()}
        own = _copy(optimizer, memo)
        if len(chosen) == 1:  # another rank may have what this one is joined with
            (name, only), *_ = copies.items()
            copies[f"{name} (a copy)"] = twin = _like(only)
            next(g for g in own.param_groups if any(p is only for p in g["params"]))["params"].append(twin)
        for group in own.param_groups:
            if isinstance(group.get("lr"), int | float | Tensor):
                group["lr"] = group["lr"] * 0 + _RATE
        alike = next(iter(chosen.values()))
        gradients = {name: _gradient(chosen.get(name, alike)) for name in copies}

        def closure() -> Tensor:
            for name, copied in copies.items():
                copied.grad = gradients[name] * (factor if name == changed else 1.0)
                if not copied.grad.is_sparse:  # a step that moves weights before it calls this (SAM) is to notice
                    copied.grad += copied.detach()
            return torch.zeros(())

        if changed is not None:
            copies[changed].data.mul_(2)
        for _ in range(_STEPS):
            closure()
            type(optimizer).step(own, closure)  # type: ignore[arg-type]
        of_groups = {
            f"param_groups[{number}][{key}]": torch.as_tensor(value, dtype=torch.float64)
            for number, group in enumerate(own.param_groups)
            for key, value in group.items()
            if isinstance(value, int | float | Tensor)
        }
        return {name: copied.detach() for name, copied in copies.items()} | of_groups


def _like(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.randn_like(local(parameter.detach())))


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None  # else it is not chosen
    gradient = local(parameter.grad.detach())
    return gradient if gradient.is_sparse else torch.randn_like(gradient)


def _copy(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A copy of an optimizer and of those that it wraps, with its state.

    Args:
        optimizer: the optimizer.
        memo: as for ``deepcopy``: the copies of some parameters. The copy has no others.
    """
    left_out = nn.Parameter(torch.empty(0))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if memo.setdefault(id(parameter), left_out) is left_out and parameter in optimizer.state:
                memo[id(optimizer.state[parameter])] = {}
    # copies of parameters are their local parts, and so is what is kept of them
    memo |= {id(each): local(each).clone() for each in tree_leaves(list(optimizer.state.values())) if is_divided(each)}
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step" and "_hook" not in name}
    for value in attributes.values():
        if isinstance(value, Optimizer):
            memo[id(value)] = _copy(value, memo)
    memo[id(optimizer)] = own = type(optimizer).__new__(type(optimizer))
    vars(own).update(deepcopy(attributes, memo))
    own.__setstate__({})  # which makes the hooks
    for group in own.param_groups:
        group["params"][:] = [parameter for parameter in group["params"] if parameter is not left_out]
    own.param_groups[:] = [group for group in own.param_groups if group["params"]]
    own.state.pop(left_out, None)
    return own
