"""Lets a ``torch.autograd.Function`` surround layers: reversible blocks, blocks that compute again to save memory.

Before ``forward`` runs, autograd looks once which arguments need gradients, and inside nothing has a graph. So
a Function is a unit: the stage that computes its first layer has its arguments before the Function begins, the stage
before ends there, and a cut between its layers raises.

Its backward computes layers again, in an order of its own, from states of torch's generators that its forward saw. So
all that draws inside draws from one stream.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import CallRecord
from lightning_pipe.intercept.tensor_state import version_of
from lightning_pipe.intercept.torch_functions import leaves_of, results_of
from lightning_pipe.intercept.torch_patches.activation_checkpoints import run_again
from lightning_pipe.intercept.torch_patches.patch import Patch

if TYPE_CHECKING:
    from lightning_pipe.intercept.stage_run import StageRun
    from lightning_pipe.intercept.turns.run import TurnRun

_original = vars(Function)["apply"]
_ONE_STAGE = (
    "Let one Function surround one layer, or layers of one stage alone: balance=[...]; or keep all layers on one "
    "device, of which strategy='ddp' uses several."
)


class Unit:
    """A Function that is being applied outside layers.

    Args:
        name: that of its class.
        run: the run of the step, as it is before.
        differentiable: whether its backward may come. If not, it is like any other code.

    Attributes:
        calls: how many calls there were before.
        following: the number that the next new tensor would have got.
    """

    def __init__(self, name: str, run: StageRun | TurnRun, differentiable: bool) -> None:
        self.name, self.differentiable = name, differentiable
        self.calls, self.following = len(run.tracker.calls), run.tracker.numbers.following
        self._layers = len(run.called)
        self._versions = self._count(run)

    @staticmethod
    def _count(run: StageRun | TurnRun) -> dict[int, int | None]:
        with run.tracker.paused():
            return {number: version_of(tensor) for number, tensor in run.tracker.numbers.alive()}

    def has_called(self, run: StageRun | TurnRun) -> bool:
        """Whether it has called layers that run here."""
        return len(run.called) > self._layers

    def check_whole(self, run: StageRun | TurnRun, layer: str) -> None:
        """Raise if the cut before ``layer``, which the Function calls, cannot lie before the Function."""
        if self.has_called(run):
            raise CutError(
                f"the cut before layer '{layer}' lies inside the torch.autograd.Function '{self.name}': its backward "
                "needs all layers that it calls on one stage.",
                hint=_ONE_STAGE,
            )
        if any(self._versions.get(number, version) != version for number, version in self._count(run).items()):
            raise CutError(
                f"the torch.autograd.Function '{self.name}' changes a tensor in place before it calls layer '{layer}', "
                "and there is a cut before that layer.",
                hint="Change it before the Function begins, or use the out-of-place form.",
            )


def check_not_hidden(layer: str) -> None:
    """Raise if code runs inside a Function that began unnoticed."""
    if torch.is_grad_enabled():
        return
    forwards = dict(_forwards(Function))
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        name = forwards.get(frame.f_code)
        if name is not None:
            raise CutError(
                f"the torch.autograd.Function '{name}' calls layer '{layer}', next to a cut, and was applied under "
                "another name.",
                hint=f"Call {name}.apply(...) where it is used, not a name that was given to {name}.apply before.",
            )


def _forwards(base: type[Function]) -> Iterator[tuple[Any, str]]:
    for cls in base.__subclasses__():
        if not _is_internal(cls):
            yield getattr(cls.forward, "__code__", None), cls.__name__
        yield from _forwards(cls)


def _is_internal(cls: type[Function]) -> bool:
    """Whether a Function is torch's or the engine's own: checkpoints, hooks, compiled code."""
    return cls.__module__.partition(".")[0] in ("torch", "lightning_pipe")


def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    run, apply = FUNCTIONS.run, _original.__get__(None, cls)
    if _is_internal(cls) or (run is not None and run.inside):
        return apply(*args, **kwargs)
    return run_again(apply, args, kwargs) if run is None else _surround(run, cls.__name__, apply, args, kwargs)


def _surround(run: StageRun | TurnRun, name: str, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Apply a Function that may surround layers."""
    tracker = run.tracker
    leaves = leaves_of(args, kwargs)
    derived = any(isinstance(leaf, Tensor) and tracker.numbers.derived(leaf) for leaf in leaves)
    if derived:
        tracker.digest.surround(name, leaves)
    if derived and tracker.waiting and tracker.complete:
        run.arrive()  # it calls this stage's first layer
    # Foreign parameters among the arguments must not give placeholders a graph.
    with _as_unit(run, name, derived), torch.set_grad_enabled(torch.is_grad_enabled() and not tracker.waiting):
        result = apply(*args, **kwargs)
    if derived:
        found = results_of(result, ())
        if tracker.waiting:
            tracker.follow(found, tracker.expect(f"{name}.apply"))
        else:
            tracker.calls.append(CallRecord(f"{name}.apply", *tracker.numbers.give_all(found)))
    return result


@contextmanager
def _as_unit(run: StageRun | TurnRun, name: str, derived: bool) -> Iterator[None]:
    if run.surroundings.unit is not None:  # it belongs to the one around it
        yield
        return
    # A checkpoint around it computes without gradients at first, and with them later.
    differentiable = (derived and torch.is_grad_enabled()) or run.surroundings.checkpoint is not None
    with run.surroundings.stream(-1, len(run.tracker.calls)) if differentiable else nullcontext():
        unit = run.surroundings.unit = Unit(name, run, differentiable)
        run.tracker.digest.in_function = True
        try:
            yield
        finally:
            run.surroundings.unit = None
            # its backward computes the gradients of the layers that it has called at one go
            run.whole |= differentiable and unit.has_called(run)
            run.tracker.digest.in_function = False


FUNCTIONS = Patch((Function, "apply", classmethod(_apply)))
"""While it is installed, Functions that are applied by the name of their class are units."""
