"""What the tensors of the batch went through outside layers: the same on all stages, or they take different paths.

A stage does not see what another one makes of the batch before it calls a layer; a step that decides by rank could give
the layer something else there than on one device, and all numbers would look well.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Sequence
from functools import cache

from torch import Tensor

from lightning_pipe.intercept.random_streams import mix

_tokens = itertools.count()


class Lineage:
    """Numbers for the tensors that come from the batch alone, in one run of the step on one stage.

    A number stands for the functions that made a tensor, not for their plain arguments, which may differ between calls
    that are as good: numbers of the step, coefficients. Tensors that come from elsewhere have none: a module may make
    and keep them in its first run.
    """

    def __init__(self) -> None:
        # a tensor may outlive a run as an attribute: the mark of an earlier run does not count
        self._token = next(_tokens)
        # by id, since ranks that are threads may be given the same objects
        self._batch: dict[int, tuple[Tensor, int]] = {}
        self._draws = 0

    def begin(self, leaves: Iterable[object]) -> None:
        """The run is about to begin, with this batch."""
        for position, leaf in enumerate(leaves, start=1):
            if isinstance(leaf, Tensor):
                self._batch[id(leaf)] = leaf, position

    def draw(self, name: str) -> None:
        """A function of that name draws from the stream of the code around."""
        # ranks that have drawn different functions are at different places of the stream from here on
        self._draws = mix(self._draws, _number(name))

    def numbers(self, tensors: Iterable[Tensor]) -> list[int]:
        """The numbers of those that come from the batch."""
        found: list[int] = []
        for tensor in tensors:
            known = self._batch.get(id(tensor))
            if known is not None:
                found.append(known[1])
            elif (mark := getattr(tensor, "_pipe_lineage", None)) is not None and mark[0] == self._token:
                found.append(mark[1])
        return found

    def follow(self, name: str, numbers: Iterable[int], left: Iterable[Tensor]) -> None:
        """A function of that name makes something of tensors with these numbers, and leaves ``left`` behind."""
        number = mix(_number(name), *numbers)
        for tensor in left:
            if id(tensor) in self._batch:
                self._batch[id(tensor)] = tensor, number
                continue
            tensor._pipe_lineage = (self._token, number)  # type: ignore[attr-defined]

    def given(self, tensors: Sequence[Tensor]) -> int:
        """What a call is given of the batch, and what was drawn before it, in one number."""
        if not tensors and not self._draws:
            return 0  # the usual case: what is derived has a record of its own
        found = self.numbers(tensors)
        return mix(self._draws, *found) if found or self._draws else 0


@cache
def _number(name: str) -> int:
    # not ``hash``, which differs between processes for the same string
    return zlib.crc32(name.encode())
