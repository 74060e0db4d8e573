"""Sees which attributes of modules the step's own code sets, and which the layers do."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.compiler import is_compiling

from lightning_pipe.intercept.torch_patches.patch import current_run

_set = nn.Module.__setattr__


def _set_attribute(module: nn.Module, name: str, value: Any) -> None:
    # a compiler that traces a layer is to see what it would see without us
    run = None if is_compiling() else current_run()
    if run is not None:
        run.layer_calls.setting(run, module, name, value)
    _set(module, name, value)


ATTRIBUTES = ((nn.Module, "__setattr__", _set_attribute),)
