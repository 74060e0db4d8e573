"""Around runs of the step of which nothing is to come: they only tell what it computes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_pipe.engine.refusals import scaled_by_frequency
from lightning_pipe.engine.stage import Stages
from lightning_pipe.intercept.absent_tensor import is_absent
from lightning_pipe.intercept.generators import TorchGenerators
from lightning_pipe.intercept.recompute import BufferGuard, recomputing
from lightning_pipe.intercept.snapshot import Snapshot
from lightning_pipe.intercept.torch_functions import draws
from lightning_pipe.torch_internals import NormBase

_DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout
_SILENT = (*_DROPOUTS, NormBase, nn.RNNBase, nn.MultiheadAttention)
"""Modules that drop or normalise by the batch, in training alone."""

_local = threading.local()


def is_alone() -> bool:
    """Whether the code that asks runs for a check: other replicas may not, so it must not wait for them."""
    return getattr(_local, "alone", False)


@contextmanager
def leaving_no_trace(stages: Stages, *, trained: bool = False) -> Iterator[None]:
    """Around a trial run: the parts of the module are afterwards as before. Its own attributes every run puts back.

    Args:
        stages: run it.
        trained: whether parameters that are trained are put back, too, whatever has changed them, by ``.data`` as well;
            steps change the others (averages, codebooks).
    """
    module = stages.interceptor.module
    kept = Snapshot({name: part for name, part in module.named_modules() if part is not module}, buffers=False)
    values = [
        (part._parameters, name, parameter, parameter.data, parameter.detach().clone())
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and (trained or not parameter.requires_grad) and not is_absent(parameter)
    ]
    _local.alone = True
    try:
        with recomputing(), torch.no_grad(), BufferGuard([module]).restored(copies=True):
            yield
    finally:
        _local.alone = False
        for parameters, name, parameter, data, value in values:
            data.copy_(value)
            parameter.data = data
            parameters[name] = parameter
        kept.undo()
        stages.interceptor.state.set_by_run = {}  # a graph in it would refer to parameters, which may be freed next


class NotRandom(TorchFunctionMode):
    """Within it nothing that the module computes is random, as far as dropout is the reason.

    Functions for dropout do nothing; it notes whether others draw, in layers too, and in which type they compute.
    Losses do not show that gradients are no sums over samples: functions that are asked for such are refused.

    Args:
        module: the module.
        generators: those of torch.
        whole: whether all of the module is as in an evaluation; layers may compute something else in training.

    Attributes:
        drew: whether a function has drawn.
        autocast: the type of numbers that the step computes with by itself; ``None``: that of its tensors.
    """

    drew = False
    autocast: torch.dtype | None = None

    def __init__(self, module: nn.Module, generators: TorchGenerators, *, whole: bool) -> None:
        super().__init__()
        self._generators = generators
        self._silent = [(part, part.training) for part in module.modules() if whole or isinstance(part, _SILENT)]

    @override
    def __enter__(self) -> NotRandom:
        super().__enter__()  # type: ignore[no-untyped-call]
        for part, _ in self._silent:
            part.training = False
        return self

    @override
    def __exit__(self, *error: Any) -> None:
        for part, training in self._silent:
            part.training = training
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "__get__":  # half of all calls ask a tensor for its type, shape or the like
            return func(*args)
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                self.autocast = torch.get_autocast_dtype(kind)
        if kwargs.get("scale_grad_by_freq"):
            raise scaled_by_frequency(f"A call of {name}()")
        if name == "scaled_dot_product_attention":
            args = (*args[:4], *(0.0 for _ in args[4:5]), *args[5:])
            kwargs = {**kwargs, "dropout_p": 0.0} if len(args) < 5 else kwargs
        elif "dropout" in name:
            return args[0] if args else kwargs["input"]
        if not draws(func, name):
            return func(*args, **kwargs)
        before = self._generators.states()
        result = func(*args, **kwargs)
        self.drew |= kwargs.get("generator") is not None or not all(map(torch.equal, before, self._generators.states()))
        return result
