"""Puts modules back as they were before their parameters were divided: same classes, same parameter objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pipe.intercept.absent_tensor import AbsentTensor, exchange
from lightning_pipe.local_parts import is_divided, succeed, whole
from lightning_pipe.parameters.ownership import Ownership
from lightning_pipe.torch_internals import composable_states


def undoable(module: nn.Module, divide: Callable[[], object]) -> Callable[[], None]:
    """Let ``fully_shard`` and ``parallelize_module`` change a module; the values of parameters that they replace go.

    Args:
        module: the module.
        divide: divides it.

    Returns:
        Puts it back, with the whole values of then. Collective over the processes that divide it.
    """
    parts = [(part, type(part), _tables(part), set(vars(part))) for part in module.modules()]
    divide()
    added = {part: vars(part).keys() - names for part, _, _, names in parts}

    def substitutes() -> dict[nn.Parameter, nn.Parameter]:
        """What stands for other parameters now, by these; of several names once."""
        places = [(part, name, old) for part, _, tables, _ in parts for name, old in tables["_parameters"].items()]
        now = ((old, part._parameters[name]) for part, name, old in places)
        return {old: new for old, new in now if old is not None and new is not None and new is not old}

    for parameter, now in substitutes().items():
        succeed(now, parameter)
        parameter.data = parameter.data.new_empty(0)

    @torch.no_grad()
    def undo() -> None:
        for parameter, now in substitutes().items():
            _become(parameter, now)
        for part, kind, tables, _ in parts:
            part.__class__ = kind
            composable_states.pop(part, None)
            for name, table in tables.items():
                vars(part)[name].clear()
                vars(part)[name].update(table)
            for name in added[part]:
                vars(part).pop(name, None)

    return undo


def _tables(part: nn.Module) -> dict[str, dict[Any, Any]]:
    """The dictionaries of a module that have its parameters and its hooks."""
    names = [name for name, value in vars(part).items() if isinstance(value, dict) and "_hooks" in name]
    return {name: copy(vars(part)[name]) for name in ("_parameters", *names)}


def _become(parameter: nn.Parameter, now: nn.Parameter) -> None:
    """Let a parameter have the values of another one."""
    parameter.grad = None
    succeed(parameter, now)
    parameter.requires_grad_(now.requires_grad)
    if isinstance(now, AbsentTensor):  # released when the first batch had shown who uses it
        exchange(parameter, AbsentTensor.like(now))
    else:
        parameter.data = whole(now.detach())


def refer_to_module(optimizers: Iterable[Optimizer], module: nn.Module, names: Ownership) -> None:
    """Let optimizers that have parts of parameters have what the module has in their place now.

    Args:
        optimizers: of the module.
        module: the user's module.
        names: of the parameters.
    """
    named: dict[str | None, nn.Parameter] = dict(module.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for place, part in enumerate(group["params"]):
                # a part that was released when the first batch had shown who uses it stands for a parameter, too
                stands = is_divided(part) or isinstance(part, AbsentTensor)
                now = named.get(names.known_name(part), part) if stands else part
                group["params"][place] = now
                if now is not part and part in optimizer.state:
                    optimizer.state[now] = optimizer.state.pop(part)
