"""The hook ``configure_model`` builds layers without memory, and has them divided at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipe.construction import deferred_init, paused
from lightning_pipe.patches import replaced, unheard


@contextmanager
def configured_without_memory(module: pl.LightningModule, divide: Callable[[], None]) -> Iterator[None]:
    """While the context lasts, what ``configure_model`` builds is recorded, and divided when it returns.

    Lightning calls the hook, and so do callbacks in their ``setup``: whoever is first finds the module divided.

    Args:
        module: the user's module; nothing happens if it does not override the hook.
        divide: divides the layers if that has not been done.
    """
    configure_model = module.configure_model

    def configure() -> None:
        with deferred_init():
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
