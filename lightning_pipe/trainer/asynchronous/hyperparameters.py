"""Hyperparameters of batches in flight: update t uses the learning rate of batch t."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipe.intercept.kept_state import alike

Settings = dict[tuple[int, str], Any]
"""By the numbers of parameter groups, and by keys, everything but parameters."""


class Hyperparameters:
    """Remembers the hyperparameters that schedulers and hooks have set for every batch.

    What changes between steps was set for the batch that comes next. What changes around a step, by the user's hooks or
    by an optimizer that counts there, is what the next step finds.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> settings = Hyperparameters()
        >>> settings.note(0, optimizer)
        >>> optimizer.param_groups[0]["lr"] = 0.01
        >>> settings.note(1, optimizer)
        >>> with settings.of(0, optimizer):
        ...     print(optimizer.param_groups[0]["lr"])
        0.1
        >>> optimizer.param_groups[0]["lr"]
        0.01
    """

    def __init__(self) -> None:
        self._noted: dict[int, Settings] = {}
        self._last: Settings = {}
        self._set: Settings = {}
        self._of_steps: Settings = {}

    def note(self, batch: int, optimizer: Optimizer) -> None:
        """Note what has been set by now: on one device the step of this batch would be due."""
        self._look(optimizer)
        self._noted[batch], self._set = self._set, {}

    def _look(self, optimizer: Optimizer) -> None:
        """See what has been set since the last step or look, for the batch that comes next."""
        now = _settings(optimizer)
        self._set |= {place: now[place] for place in _changed(now, self._last)}
        self._last = now

    @contextmanager
    def of(self, batch: int, optimizer: Optimizer) -> Iterator[None]:
        """Around the step of a batch: its own hyperparameters."""
        self._look(optimizer)
        groups, own = optimizer.param_groups, self._of_steps
        for number in [each for each in self._noted if each <= batch]:
            own |= self._noted.pop(number)
        former = {(i, key): groups[i][key] for i, key in _changed(own, self._last) & self._last.keys()}
        for i, key in former:
            groups[i][key] = own[i, key]
        before = _settings(optimizer)
        try:
            yield
        finally:
            after = _settings(optimizer)
            changed = _changed(after, before)
            own |= {place: after[place] for place in changed}
            for i, key in former.keys() - changed:
                groups[i][key] = former[i, key]
            self._last = _settings(optimizer)


def _changed(now: Settings, before: Settings) -> set[tuple[int, str]]:
    return {place for place in now if place not in before or not alike(now[place], before[place])}


def _settings(optimizer: Optimizer) -> Settings:
    return {
        (number, key): value.clone() if isinstance(value, Tensor) else value
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }
