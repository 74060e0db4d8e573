"""Runs of the step for one stage of which nothing is to come: they only tell what the step computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_pipe.engine.batch import Batch
from lightning_pipe.engine.stage import Crossings, Stages, loss_of
from lightning_pipe.intercept.absent_tensor import is_absent
from lightning_pipe.intercept.crossing import Crossing
from lightning_pipe.intercept.recompute import recomputing
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.intercept.torch_functions import draws
from lightning_pipe.torch_internals import DropoutNd, NormBase

_SILENT = (DropoutNd, NormBase, nn.RNNBase, nn.MultiheadAttention)
"""Modules that drop or normalise by the batch, in training alone."""
_SEEDS = 8
"""With how many other random numbers a run is repeated that may depend on them."""

_local = threading.local()


def is_alone() -> bool:
    """Whether the code that asks runs for a check: other replicas may not, so it must not wait for them."""
    return getattr(_local, "alone", False)


@dataclass
class TrialRuns:
    """Runs of the step for one stage without dropout, and with the norms of an evaluation.

    ``whole``: whether the whole module is as in an evaluation; layers may compute something else in training. ``drew``:
    whether a run has drawn random numbers there.
    """

    stages: Stages
    stage: int
    batch: Batch
    whole: bool = False
    drew: bool = False

    def run(self, index: int, part: Any, inbound: Crossing | None, seed: int | None = None) -> tuple[Crossings, Any]:
        """Run the step. Returns what leaves the stage, by the stage that receives it, and what the step returned.

        Args:
            index: the micro-batch that it draws the random numbers of: up to the stage's layers it goes the same way.
            part: the micro-batch.
            inbound: what the stage receives for it.
            seed: from the stage's first layer on, the micro-batch that it draws the random numbers of.
        """
        trial = replace(self.batch, micro_batches=[part] * (index + 1), training=False, results={})
        marks: list[Any] = []

        def begin() -> None:
            if seed is not None:
                trial.streams.seed_user_code(seed)
            marks.append(trial.streams.state())

        # each finds what the step and the layers keep as it was: a loss that depends on it is not random
        with put_back(self.stages), _not_random(self.stages, self.stage, begin, whole=self.whole) as functions:
            found = self.stages.trial(self.stage, index, trial, inbound)
        # Without a mark the step has not come to the stage's layers, and nothing is known of what they draw.
        self.drew |= functions.drew or not marks or marks[-1] != trial.streams.state()
        return found

    def loss(self, index: int, part: Any, inbound: Crossing | None) -> Tensor:
        """The loss of a run on the last stage; the arguments are those of `run`."""
        return loss_of(self.run(index, part, inbound)[1])

    def are_random(
        self, index: int, part: Any, inbound: Crossing | None, same: Callable[[Crossings, Any], bool]
    ) -> bool:
        """Whether a run is another one with other random numbers: from the start, or from this stage's layers on.

        A layer that is left out with a small probability shows in some runs alone.

        Args:
            index: as for `run`.
            part: the micro-batch.
            inbound: what the stage receives for it.
            same: whether what a run returns is what it returned before.
        """
        first = len(self.batch.micro_batches)  # streams that no micro-batch of the batch draws from
        for seed in range(first, first + _SEEDS):
            if not same(*self.run(index, part, inbound, seed)):
                return True
            try:
                if not same(*self.run(seed, part, inbound)):
                    return True
            except Exception:  # it takes another way to this stage
                return True
        return False


@contextmanager
def leaving_no_trace() -> Iterator[None]:
    """Around trial runs, each of which puts back what the step changes."""
    _local.alone = True
    try:
        with recomputing(), torch.no_grad():
            yield
    finally:
        _local.alone = False


@contextmanager
def put_back(stages: Stages) -> Iterator[None]:
    """All parts of the module are afterwards as they were before. Its own attributes every run puts back anyway."""
    computing, module = {*stages.interceptor.computing()}, stages.interceptor.module
    around = {name: part for name, part in module.named_modules() if part not in computing and part is not module}
    kept = stages.interceptor.state.everything(computing), Snapshot(around, buffers=False)
    try:
        with stages.buffers.restored(), parameters_kept(module.modules(), trained=False):
            yield
    finally:
        for each in kept:
            each.undo()


@contextmanager
def parameters_kept(parts: Iterable[nn.Module], *, trained: bool = True) -> Iterator[None]:
    """The parameters of some modules are afterwards as they were before, whatever has changed them, by ``.data`` too.

    Args:
        parts: the modules, without those in them.
        trained: whether those that are trained are kept, too; steps change the others (averages, codebooks).
    """
    kept = [
        (part._parameters, name, parameter, parameter.data, parameter.detach().clone())
        for part in parts
        for name, parameter in part._parameters.items()
        if parameter is not None and (trained or not parameter.requires_grad) and not is_absent(parameter)
    ]
    try:
        yield
    finally:
        for parameters, name, parameter, data, value in kept:
            data.copy_(value)
            parameter.data = data
            parameters[name] = parameter


class _NoDropout(TorchFunctionMode):
    """Once it is ``on``, functions for dropout do nothing; notes whether others may draw, in layers too."""

    on = drew = False

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if self.on and name == "scaled_dot_product_attention":
            args = (*args[:4], *(0.0 for _ in args[4:5]), *args[5:])
            kwargs = {**kwargs, "dropout_p": 0.0} if len(args) < 5 else kwargs
        elif self.on and "dropout" in name:
            return args[0] if args else kwargs["input"]
        else:
            self.drew |= self.on and draws(func, name)
        return func(*args, **kwargs)


@contextmanager
def _not_random(stages: Stages, stage: int, then: Callable[[], None], *, whole: bool) -> Iterator[_NoDropout]:
    """Nothing that the stage computes is random; up to there the step must go the way that it has gone.

    Args:
        stages: the stages of this rank.
        stage: the one that runs.
        then: called where the stage's layers begin.
        whole: as for `TrialRuns`.
    """
    module, layers = stages.interceptor.module, stages.interceptor.layers
    silent = [part for part in module.modules() if whole or isinstance(part, _SILENT)]
    before = [part.training for part in silent]
    functions = _NoDropout()

    def silence() -> None:
        functions.on = True
        for part in silent:
            part.training = False

    def begin(*_: Any) -> None:
        if next(calls) == earlier_passes:
            silence()
            then()

    start = stages.layers[stage].layers.start
    earlier_passes, first = divmod(start, len(layers))
    calls = count()
    hook = layers[first].register_forward_pre_hook(begin)
    try:
        if start == 0:
            silence()
        with functions:
            yield functions
    finally:
        hook.remove()
        for part, training in zip(silent, before, strict=True):
            part.training = training
