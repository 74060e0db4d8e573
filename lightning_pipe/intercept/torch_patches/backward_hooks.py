"""Lets modules and tensors have backward hooks.

``register_full_backward_hook`` puts a node into the graph before and behind a module. Where an earlier stage computes
the module there is no graph: the hook runs on the rank that computes it. There, what comes out of a node counts as the
tensor that went in. A module that is cut has the one node here and the other one there: its hook cannot run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import BackwardHook

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.intercept.torch_patches.patch import Patch

_original = BackwardHook._apply_on_tensors


def _apply_on_tensors(self: BackwardHook, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    run = BACKWARD_HOOKS.run
    if run is None or run.inside:
        return _original(self, fn, args)  # type: ignore[no-untyped-call]
    hooked = run.surroundings.hooked
    is_output = self.n_inputs >= 0  # known from the first call on, which is for the input
    if not is_output and run.tracker.waiting and run.tracker.complete:
        run.arrive()  # it is this stage's first layer
    if any(isinstance(arg, Placeholder) for arg in args):
        # Places without tensors: the input has gradients, elsewhere.
        return args, None if is_output else []
    with run.tracker.paused():
        results, places = _original(self, fn, args)  # type: ignore[no-untyped-call]
    for old, new in zip(args, results, strict=True):
        if isinstance(old, Tensor) and new is not old:
            run.tracker.numbers.rename(old, new, replace=is_output)
    if is_output and self in hooked:
        del hooked[hooked.index(self) :]
    elif not is_output and places is not None and self.user_hooks:
        hooked.append(self)
    return results, places


def check_not_divided(hooks: list[BackwardHook], layer: str, module: nn.Module | None) -> None:
    """Raise if a module with hooks has begun, other than ``module``, which is the layer behind the cut."""
    for hook in hooks:
        if hook.module is not module:
            raise CutError(
                f"the cut before layer '{layer}' lies inside a {type(hook.module).__name__} with a full backward hook, "
                "which needs the gradients at both ends of the module on one stage.",
                hint="Register it on the layers, or one on the tensor that goes into the module: x.register_hook(...); "
                "a full backward pre-hook, which needs those of the result alone, works.",
            )


def _noticed(name: str) -> Callable[..., Any]:
    """A method of tensors that registers a hook; one of a step's graph must run once, so its backward is not divided.

    Parameters are there for all micro-batches, and their hooks run when all of these are done.
    """
    original = getattr(Tensor, name)

    @functools.wraps(original)
    def register(self: Tensor, *args: Any) -> Any:
        run = BACKWARD_HOOKS.run
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


BACKWARD_HOOKS = Patch(
    (BackwardHook, "_apply_on_tensors", _apply_on_tensors),
    *(
        (Tensor, name, _noticed(name))
        for name in ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")
    ),
)
"""While it is installed, backward hooks that are set up look where their module runs."""
