"""What a step draws from that is its module's own: random generators and iterators which are attributes.

Each run of a step takes from them, and one device runs it once for each micro-batch. Stages compare what they give to
calls, so other items on one of two stages are an error there. What comes to nothing, runs again, or in several pipes,
nobody compares: such runs must take nothing.
"""

from __future__ import annotations

import io
import pickle
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_pipe.errors import RepeatedRunError
from lightning_pipe.intercept.module_state import attributes

_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


@contextmanager
def untouched(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Around a run of a step that may take nothing.

    Args:
        modules: those whose attributes count, by name.

    Raises:
        RepeatedRunError: it has taken something.
    """
    generators = [(name, each, _state(each)) for name, _, each in attributes(modules, _GENERATORS)]
    iterators = [
        (name, _Watched(place, each))
        for name, place, each in attributes(modules, (Iterator,))
        if not isinstance(each, io.IOBase)  # an open file is one, too
    ]
    try:
        yield
    finally:
        taken = [name for name, each, state in generators if _state(each) != state]
        taken += [name for name, watched in iterators if watched.end()]
        # what ends a run early is a BaseException; an error of the user's step says more than this one
        if taken and not isinstance(sys.exception(), Exception):
            raise RepeatedRunError(
                f"the step draws from a random generator or an iterator of its own, 'self.{min(taken)}'. It runs more "
                "than once for a micro-batch, or several ranks complete it: its runs would see different numbers.",
                hint="Draw from the global generators of torch, NumPy or Python: their numbers depend on the step and "
                "the micro-batch alone. Let items come with the batch (CombinedLoader), or take them in a hook: "
                "on_train_batch_start.",
            )


def _state(generator: Any) -> bytes:
    """The state of a random generator of torch, Python or NumPy."""
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().numpy())
    return pickle.dumps(generator)


class _Watched(Iterator[Any]):
    """Stands in the place of an iterator that is an attribute.

    Args:
        place: the mapping or list that holds it, and the key there.
        iterator: what is there.
    """

    def __init__(self, place: tuple[Any, Any], iterator: Iterator[Any]) -> None:
        self._place, self._iterator, self._taken = place, iterator, False
        holder, key = place
        holder[key] = self

    def __next__(self) -> Any:
        self._taken = True
        return next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def end(self) -> bool:
        """Put the iterator into its place again, unless the step has put another one there; whether it was used."""
        holder, key = self._place
        with suppress(LookupError):
            if holder[key] is self:
                holder[key] = self._iterator
        return self._taken
