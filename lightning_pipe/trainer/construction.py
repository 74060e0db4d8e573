"""Modules are built without memory, also by ``configure_model``, and get their values once they are divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_pipe.construction import check_all_set, deferred_init, materialize, paused, place_meta, unread
from lightning_pipe.patches import replaced, unheard


@contextmanager
def configured_without_memory(
    module: pl.LightningModule, divide: Callable[[], None], *, recorded: bool
) -> Iterator[None]:
    """While the context lasts, what ``configure_model`` builds is recorded, and divided when it returns.

    Lightning calls the hook, and so do callbacks in their ``setup``: whoever is first finds the module divided.

    Args:
        module: the user's module; nothing happens if it does not override the hook.
        divide: divides the layers if that has not been done.
        recorded: ``False``: it is built as it is called, on every rank: it divides its parameters itself.
    """
    configure_model = module.configure_model

    def configure() -> None:
        with deferred_init() if recorded else nullcontext():
            configure_model()
        with paused():
            divide()

    if not is_overridden("configure_model", module):
        yield
        return
    # a callback for averages copies the module, which is divided by then
    quiet = unheard(".*WeightAveraging doesn't support sharding model layers.*")
    with quiet, replaced(module, "configure_model", configure):
        yield


def without_memory(*, empty: bool) -> AbstractContextManager[Any]:
    """In which a module is built: the whole one need not fit on one device, nor into one process.

    Args:
        empty: on the meta device, without the values of a constructor.
    """
    return torch.device("meta") if empty else deferred_init()


def let_go_when_loaded(state: Mapping[str, Any], module: pl.LightningModule) -> Any:
    """A state of which each tensor is read when it is copied into the module, and let go at once.

    Args:
        state: as it was read; its tensors lie in a mapped file.
        module: is to be loaded; what is on the meta device could take no values.
    """
    place_meta(module)
    return unread(copy(state))


def settle(module: nn.Module) -> None:
    """Before the first use: everything on this rank has values and memory.

    Raises:
        CutError: nothing has initialised something that was on the meta device.
    """
    check_all_set(module)
    materialize(module)
