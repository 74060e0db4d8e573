"""Numbers that a step or its layers change outside of modules: globals, and attributes of classes.

A run of the step that ends early is undone in the modules' attributes alone, and other ranks are told of these alone::

    COUNTER = 0                                 two micro-batches

    def training_step(self, batch):             stage 0             stage 1 on the same rank
        global COUNTER
        COUNTER += 1                            1, then 3           2, then 4
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from lightning_pipe.intercept.user_classes import is_users

_NUMBERS = (int, float)
_LOOKS = 8
"""In so many batches they are looked at: the first ones may be those of the sanity check."""


class GlobalNumbers:
    """Warns about such numbers after one of the first batches.

    Args:
        modules: those whose code runs in steps.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kinds: set[Any] = {type(module) for module in modules}
        self._before: dict[str, Any] | None = None
        self._left = _LOOKS

    def begin(self) -> None:
        """A batch begins."""
        if self._left and self._before is None:
            self._before = dict(self._numbers())

    def end(self) -> None:
        """A batch is over: warn of the first one that has changed some."""
        if self._before is None:
            return
        changed = [name for name, value in self._numbers() if self._before.get(name, value) != value]
        self._before, self._left = None, 0 if changed else self._left - 1
        if changed:
            warnings.warn(
                f"The step or its layers change {', '.join(f'`{name}`' for name in changed)} outside of modules. Every "
                "stage runs the step for every micro-batch and changes it, and no rank is told of what others do "
                "there: it may not be what it is on one device, nor what is computed from it. Keep it in the "
                "LightningModule, and count where the batch is over: in on_train_batch_end.",
                stacklevel=2,
            )

    def _numbers(self) -> Iterator[tuple[str, Any]]:
        """All of them, as code writes them."""
        kinds = {base for kind in self._kinds for base in kind.__mro__ if base is not object and is_users(base)}
        holders = [(kind.__qualname__ + ".", kind) for kind in kinds]
        names = {kind.__module__ for kind in kinds}
        holders += [(f"{name}.", module) for name in names if (module := sys.modules.get(name)) is not None]
        for prefix, holder in sorted(holders, key=lambda each: each[0]):
            for name, value in [*vars(holder).items()]:
                if type(value) in _NUMBERS and not name.startswith("__"):
                    yield prefix + name, value
