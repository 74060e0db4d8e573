"""Lets tensors have backward hooks, and refuses those of modules that are no parts of a layer.

``register_full_backward_hook`` puts a node into the graph before and behind a module, and tensors of its own between
them, which are none of those that the module is given on stages that do not compute it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import BackwardHook

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.stage_run import under_way
from lightning_pipe.torch_internals import run_backward

_original = BackwardHook._apply_on_tensors


def _apply_on_tensors(self: BackwardHook, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    run = under_way.run
    refused = run is not None and run.tracker.partial and not run.surroundings.inside and torch.is_grad_enabled()
    if refused and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        raise CutError(
            f"a {type(self.module).__name__} that is no part of a layer has a full backward hook: the gradients at its "
            "two ends may be on two stages.",
            hint="Register it on a part of the layer, or one on a tensor in the step: x.register_hook(...).",
        )
    return _original(self, fn, args)  # type: ignore[no-untyped-call]


def _noticed(owner: type[Any], name: str) -> Callable[..., Any]:
    """A method that sets up hooks; one of a step's graph must run once, so its backward is not divided.

    Hooks of saved tensors are checkpoints, too. Those of parameters run when all micro-batches are done.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def register(self: Any, *args: Any) -> Any:
        run = under_way.run
        if run is not None and isinstance(self, nn.Parameter) and args:
            raise CutError(
                f"the step calls {name} of a parameter {tuple(self.shape)}: the hook would run for every micro-batch, "
                "and once more for the batch.",
                hint="Register hooks of parameters once, outside the step: in __init__ or on_fit_start.",
            )
        if run is not None and not isinstance(self, Placeholder):
            run.whole = True
        return original(self, *args)

    return register


def _run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    if (run := under_way.run) is not None:
        run.check_backward(outputs, args[3])
    return run_backward(outputs, *args, **kwargs)


BACKWARD_HOOKS = (
    (torch.autograd, "_engine_run_backward", _run_backward),
    (BackwardHook, "_apply_on_tensors", _apply_on_tensors),
    *((Tensor, name, _noticed(Tensor, name)) for name in ("register_hook", "retain_grad")),
    (Tensor, "register_post_accumulate_grad_hook", _noticed(Tensor, "register_post_accumulate_grad_hook")),
    (saved_tensors_hooks, "__enter__", _noticed(saved_tensors_hooks, "__enter__")),
)
"""While it is installed, backward hooks that are set up look where their module runs, and backward passes for a cut."""
