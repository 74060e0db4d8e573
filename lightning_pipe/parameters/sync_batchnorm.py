"""Batch norm that normalises over the replicas at the same position in their pipelines (`torch.nn.SyncBatchNorm`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.torch_internals import BatchNorm


class _Alone(nn.SyncBatchNorm):
    """A synchronized norm of a single pipeline: torch's would synchronize the stages with each other."""

    forward = BatchNorm.forward


def synchronized_norms(module: nn.Module, *, every: bool) -> Iterator[BatchNorm]:
    """The batch norms of a module that are to be synchronized.

    Args:
        module: the user's module.
        every: all batch norms; otherwise those that the user has made synchronized ones, without a group of their own.

    Raises:
        ConfigurationError: a norm does more than torch's, which a synchronized one in its place would not.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.SyncBatchNorm):
            if part.process_group is None and not isinstance(part, _Alone):
                yield part
        elif every and isinstance(part, BatchNorm):
            if type(part).forward is not BatchNorm.forward:
                raise ConfigurationError(
                    f"sync_batchnorm=True: '{name}' is a {type(part).__name__}, which has a forward method of its own; "
                    "torch's SyncBatchNorm in its place would leave out what that does.",
                    hint="Convert the module yourself, for instance with its library's function, and leave "
                    "sync_batchnorm out.",
                )
            yield part


def synchronize(module: nn.Module, group: Any | None, *, every: bool) -> Callable[[], None]:
    """Let batch norms normalise over a group; with their modules, keys and parameters they stay the same objects.

    Args:
        module: the user's module.
        group: torch's group of the replicas; ``None`` if there is one pipeline: then each process normalises alone.
        every: see `synchronized_norms`.

    Returns:
        A function that undoes it.
    """
    norms: list[Any] = list(synchronized_norms(module, every=every and group is not None))
    before = [(norm, type(norm)) for norm in norms]
    for norm in norms:
        norm.__class__ = _Alone if group is None else nn.SyncBatchNorm
        norm.process_group = group

    def undo() -> None:
        for norm, kind in before:
            norm.__class__ = kind
            if issubclass(kind, nn.SyncBatchNorm):
                norm.process_group = None
            else:
                del norm.process_group

    return undo


def are_synchronized(module: nn.Module) -> bool:
    """Whether forward passes of the module wait for each other at norms."""
    return any(isinstance(part, nn.SyncBatchNorm) and part.process_group is not None for part in module.modules())
