"""Puts modules back as they were before their parameters were divided: same classes, same parameter objects."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import nn

from lightning_pipe.intercept.absent_tensor import AbsentTensor, exchange
from lightning_pipe.local_parts import whole
from lightning_pipe.torch_internals import composable_states


class Surface:
    """What ``fully_shard`` and ``parallelize_module`` change in the parts of a module, as it was before.

    Args:
        module: is about to be divided.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [(part, type(part), _tables(part), set(vars(part))) for part in module.modules()]
        self._added: list[tuple[nn.Module, set[str]]] = []

    def changed(self) -> None:
        """The module has been divided: note what has come, and free the values that the old parameters still hold."""
        self._added = [(part, set(vars(part)) - names) for part, _, _, names in self._parts]
        for part, _, tables, _ in self._parts:
            for name, parameter in tables["_parameters"].items():
                if parameter is not None and part._parameters[name] is not parameter:
                    parameter.data = parameter.data.new_empty(0)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the old parameters the whole values of today. Collective over the processes that divide them."""
        done: set[int] = set()
        for part, _, tables, _ in self._parts:
            for name, parameter in tables["_parameters"].items():
                now = part._parameters[name]
                if now is not None and parameter is not None and now is not parameter:
                    # what has several names is one collective
                    if id(parameter) not in done:
                        _become(parameter, now)
                    done.add(id(parameter))
        for part, kind, tables, _ in self._parts:
            part.__class__ = kind
            composable_states.pop(part, None)
            for name, table in tables.items():
                vars(part)[name].clear()
                vars(part)[name].update(table)
        for part, names in self._added:
            for name in names:
                vars(part).pop(name, None)


def _become(parameter: nn.Parameter, now: nn.Parameter) -> None:
    """Let a parameter have the values of another one."""
    parameter.grad = None
    parameter.requires_grad_(now.requires_grad)
    if isinstance(now, AbsentTensor):  # released when the first batch had shown who uses it
        exchange(parameter, AbsentTensor.like(now))
    else:
        parameter.data = whole(now.detach())


def _tables(part: nn.Module) -> dict[str, dict[Any, Any]]:
    """The dictionaries of a module that have its parameters and its hooks."""
    names = [name for name, value in vars(part).items() if isinstance(value, dict) and "_hooks" in name]
    return {name: copy(vars(part)[name]) for name in ("_parameters", *names)}
