"""Lets a ``torch.autograd.Function`` stand between layers: one call, of which other stages know the results alone.

Its backward may compute again what its forward has computed, from states of torch's generators that its forward saw. So
all that draws inside draws from one stream. It cannot surround layers: it would compute them again in an order of its
own, on whichever stage they are.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.stage_run import under_way
from lightning_pipe.intercept.torch_functions import leaves_of
from lightning_pipe.intercept.torch_patches.activation_checkpoints import run_again

# What ``Function.apply`` calls, of which code may have taken the one of its class before: ``apply = MyFunction.apply``.
_below: Any = Function.__mro__[1]


def called_within(function: str, name: str) -> CutError:
    """A Function calls a layer or an outside module."""
    return CutError(
        f"the torch.autograd.Function '{function}' calls '{name}': its backward may compute that again, in an order of "
        "its own.",
        hint="Let the Function and what it calls be one layer: layers=[...] names the module around them. Or keep all "
        "layers on one device, of which strategy='ddp' uses several.",
    )


def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    run, apply = under_way.run, super(_below, cls).apply
    outside = run is None or not (run.surroundings.inside or run.tracker.function)
    if cls is CheckpointFunction and run is not None and outside:
        raise CutError(
            "a checkpoint with use_reentrant=True stands outside layers: it computes without gradients at first, and "
            "none would come back over a cut.",
            hint="Use use_reentrant=False; inside layers both work.",
        )
    if not outside or cls.__module__.partition(".")[0] in ("torch", "lightning_pipe"):  # hooks, compiled code
        return apply(*args, **kwargs)
    if run is None:
        return run_again(apply, args, kwargs)
    tracker, leaves, name = run.tracker, leaves_of(args, kwargs), f"{cls.__name__}.apply"
    if any(isinstance(leaf, Tensor) and tracker.numbers.derived(leaf) for leaf in leaves):
        return tracker.call_function(name, apply, args, kwargs)
    # all stages have what it is given, and do the same; a checkpoint enters one stream for it when it runs again
    checkpointed = run.surroundings.checkpoint is not None
    again = run.surroundings.stream(-1, len(tracker.calls)) if checkpointed else nullcontext()
    with again, tracker.within(name):
        return apply(*args, **kwargs)


FUNCTIONS = ((_below, "apply", classmethod(_apply)),)
"""While it is installed, Functions that are applied are calls."""
