"""Hyperparameters of batches in flight: update t uses the learning rate of batch t."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipe.intercept.kept_state import alike

Settings = list[dict[str, Any]]
"""For each parameter group everything but its parameters."""


class Hyperparameters:
    """Remembers the hyperparameters that schedulers and hooks have set for every batch.

    An entry of a parameter group that changes between steps is a hyperparameter. An entry that changes in a step, such
    as a counter that the optimizer keeps there, is left alone.

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
        self._last: Settings | None = None
        self._changing: set[tuple[int, str]] = set()

    def note(self, batch: int, optimizer: Optimizer) -> None:
        """Note what is set now: on one device the step of this batch would be due."""
        self._noted[batch] = self._look(optimizer)

    def _look(self, optimizer: Optimizer) -> Settings:
        """The settings now; also notes which entries have been changed since the last step or look."""
        now = _settings(optimizer)
        for number, (group, before) in enumerate(zip(now, self._last or now, strict=False)):
            self._changing |= {(number, key) for key in group if not alike(group[key], before.get(key))}
        self._last = now
        return now

    @contextmanager
    def of(self, batch: int | None, optimizer: Optimizer) -> Iterator[None]:
        """Around the step of a batch: its own hyperparameters; those of earlier batches are forgotten.

        Args:
            batch: the batch; ``None``: no step is due, but hooks around it may set something.
            optimizer: the optimizer.
        """
        self._look(optimizer)
        own: Settings = [] if batch is None else self._noted[batch]
        if batch is not None:
            self._noted = {number: each for number, each in self._noted.items() if number > batch}
        groups = optimizer.param_groups
        places = [(groups[i], own[i][key], key) for i, key in self._changing if i < len(own) and key in own[i]]
        current = [group[key] for group, _, key in places]
        for group, value, key in places:
            group[key] = value
        try:
            yield
        finally:
            for (group, _, key), value in zip(places, current, strict=True):
                group[key] = value
            self._last = _settings(optimizer)


def _settings(optimizer: Optimizer) -> Settings:
    return [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]
