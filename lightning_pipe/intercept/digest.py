"""What the calls of a run are given, as a word for each: stages whose words differ compute with different values.

A stage that waits makes the calls of earlier stages again, with what it has itself. The last stage runs the whole step,
on what one device has::

    def training_step(self, batch):             stage 0             stage 1, which completes the step
        h = self.embed(batch)                   embed, batch 1      embed, batch 1
        h = h * self.gain                       mul, 0, 1.0         mul, 0, 0.9: an error names `mul`
        loss = self.layers(h).mean()
        self.gain *= 0.9                        (undone)            0.9

Of a tensor from layers or parameters its number counts, of one from the batch what it went through, of any other its
values, of numbers, text, containers, objects and functions that are given what they hold, else the type.

Values of a tensor on a device would have to be waited for. What it went through counts in their place, in earlier runs
of the batch too: runs that end at a cut are put back, so the last stage alone has what they have made.

In thorough runs the word of a layer's call counts what the layer's code names as well (`references`), but for what its
calls have changed, which the stage that runs it alone has. Such a word is odd: whoever answers the call does the same.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.kept_state import Place
from lightning_pipe.intercept.numbers import Numbers
from lightning_pipe.intercept.random_streams import mix
from lightning_pipe.intercept.references import bound_in
from lightning_pipe.intercept.tensor_state import memory_of, version_of
from lightning_pipe.intercept.torch_functions import leaves_of
from lightning_pipe.intercept.user_objects import inside
from lightning_pipe.torch_internals import DisableTorchFunction, functorch_active

_PLAIN = (int, float, str, bytes, torch.dtype, Number)
_NAMED = 5
"""Attributes that an error names at most."""
_DEPTH = 5
"""How deep containers and objects are looked into, from the call on."""
_SAMPLED = 1 << 14
"""Elements up to which all values of a tensor count; of larger ones about as many, evenly spread."""


class GivenOtherValuesError(CutError):
    """A call is given something else on two stages."""

    def naming(self, attributes: Iterable[str]) -> GivenOtherValuesError:
        """The same, with the attributes that may be the reason, as code writes them."""
        names = ", ".join(f"`{name}`" for name in [*dict.fromkeys(attributes)][:_NAMED])
        message = f"{self.message} The step or its layers have changed {names}." if names else self.message
        return GivenOtherValuesError(message, self.hint).with_traceback(self.__traceback__)


class Digest:
    """The words of the calls in one run of the step on one stage, each with all before it.

    Args:
        numbers: those of the derived tensors of the run.
        name_of: names parameters and buffers.
        idle: whether no stage before or behind compares anything.

    Attributes:
        idle: as given; it may change in the run.
        compares: whether it was not so at first: later runs on devices know by marks what this one has made.
        thorough: whether the words of layers that run here count what their code names.
        words: those of the calls so far.
        expected: those of the previous stage up to its cut.
        since: the token of `Numbers` from which on runs belong to the batch under way, or to those in one stream.
    """

    def __init__(self, numbers: Numbers, name_of: Callable[[Tensor], str | None], *, idle: bool = False) -> None:
        self.idle, self.compares, self.thorough = idle, not idle, False
        self.words: list[int] = []
        self.expected: Sequence[int] = ()
        self.since = 0
        self._numbers, self._name_of, self._word = numbers, name_of, 0
        # by memory what has been written there: while the reference is kept no other memory gets its address
        self._written: dict[int | None, tuple[StorageWeakRef, int]] = {}

    def begin(self, batch: Any) -> None:
        """The run is about to begin, with this batch, of which no other run has the same tensors."""
        if self.idle:
            return
        held = batch.values() if type(batch) is dict else batch if type(batch) in (list, tuple) else (batch,)
        for position, leaf in enumerate(leaves_of(tuple(held), {}), start=1):
            if isinstance(leaf, Tensor):
                self._mark(leaf, mix(position), varies=True)

    def draw(self, name: str, generator: torch.Generator | None = None) -> None:
        """A function of that name draws, from the stream of the code around or a generator."""
        # ranks that have drawn different functions are at different places of the stream from here on
        self._word = mix(self._word, _name(name))
        if generator is not None and generator.device.type != "cpu":  # else what it draws counts by its values
            self._word = mix(self._word, zlib.crc32(generator.get_state().numpy().data))

    def call(
        self, name: str, leaves: Iterable[Any], keywords: Iterable[str] = (), module: nn.Module | None = None
    ) -> None:
        """A function or module is called, here or on an earlier stage, with such leaves, the last ones by keywords."""
        if not self.idle:
            mode = torch.is_grad_enabled(), 0 if module is None else 1 + module.training
            self._word = mix(self._word, _name(name, *keywords), *mode, *[self.of(leaf) for leaf in leaves])
            self.words.append(self._word & ~1)

    def count(self, name: str, value: Any) -> None:
        """The step sets an attribute, with which the layers that are called next may compute."""
        if not self.idle:
            self._word = mix(self._word, _name(name), self.of(value))

    def referred(self, values: Iterable[tuple[Place, Any]]) -> dict[Place, int]:
        """A number for each value that the code of a layer names."""
        return {place: self.of(value, 1) for place, value in values}

    def counts_references(self, position: int) -> bool:
        """Whether the word of the previous stage at a position counts what the code of the layer names."""
        return not self.idle and position < len(self.expected) and bool(self.expected[position] & 1)

    def refer(self, referred: Mapping[Place, int], changing: Collection[Place]) -> None:
        """Count in the last word what the code of a layer has named before its call, but for what its calls change."""
        found = [mix(_name(".".join(place)), referred[place]) for place in sorted(referred) if place not in changing]
        self._word = mix(self._word, *found)
        self.words[-1] = self._word | 1

    def check(self, name: str, position: int) -> None:
        """Raise if the call at a position is given something else here than on the previous stage."""
        if position < min(len(self.words), len(self.expected)) and self.words[position] != self.expected[position]:
            raise GivenOtherValuesError(
                f"'{name}', call number {position} outside layers, is given other values here than on the stage "
                "before: a number, a tensor or an attribute depends on earlier micro-batches, the rank or time, or "
                "one of the two has called other torch functions on the batch or drawn other random numbers.",
                hint="What the step changes must not decide what layers compute in the same batch: change it in a "
                "hook, such as on_train_batch_start or on_train_batch_end; or use micro_batches=1, and no "
                "evaluation_micro_batches. With 'pipedream' and 'pipedream_2bw', which have several batches in flight, "
                "nor must what hooks change: compute it in the step, from batch_idx or trainer.global_step.",
            )

    def follow(
        self,
        names: tuple[str, ...],
        leaves: Sequence[Any],
        made: Sequence[Tensor],
        written: Sequence[Tensor],
        drawn: bool,
    ) -> None:
        """A function of that name, with its keywords, is given such leaves: what it makes is of the batch if one is.

        What it leaves on a device, where nobody reads values, comes from whatever it was given, or has been ``drawn``.
        What it has ``written`` to is another one under each name that its memory has.
        """
        of_batch = any(isinstance(leaf, Tensor) and self._of_batch(leaf) is not None for leaf in leaves)
        if not (of_batch or any(not tensor.is_cpu for tensor in (*made, *written))):
            return
        number = mix(_name(*names), *[self.of(leaf) for leaf in leaves])
        for tensor in written:
            if (memory := memory_of(tensor)) is not None:
                storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                self._written[memory] = storage, mix(number, self._written.get(memory, (None, 0))[1])
        for tensor in (*made, *written):
            self._mark(tensor, number, varies=of_batch or drawn)

    def _mark(self, tensor: Tensor, number: int, *, varies: bool) -> None:
        """Note what a tensor went through in this run; ``varies``: micro-batches have others."""
        tensor._pipe_lineage = (self._numbers.token, number, varies)  # type: ignore[attr-defined]

    def _of_batch(self, tensor: Tensor) -> int | None:
        mark = getattr(tensor, "_pipe_lineage", None)
        if mark is None or mark[0] != self._numbers.token:
            return None
        written = self._written.get(memory_of(tensor)) if self._written else None
        return int(mark[1]) if written is None else mix(mark[1], written[1])

    def of(self, leaf: Any, depth: int = 0) -> int:
        """A number for one leaf of what is given."""
        if isinstance(leaf, Tensor):
            number = self._numbers.of(leaf)  # as mostly
            return self._of_tensor(leaf) if number is None else -3 - number  # no number of Python's has this one
        if isinstance(leaf, _PLAIN):
            return _of_plain(leaf)
        if isinstance(leaf, np.generic | np.ndarray) and not leaf.dtype.hasobject:
            return mix(zlib.crc32(leaf.tobytes()), *leaf.shape)
        held = None if depth >= _DEPTH else inside(leaf)
        if held is None:  # what functions hold counts where they are given: those of a layer may count its calls
            bound = bound_in(leaf) if depth == 0 and callable(leaf) else ()
            named = _name(getattr(leaf, "__qualname__", type(leaf).__qualname__))
            return mix(named, *[self.of(each, 1) for each in bound])
        inner = itertools.chain.from_iterable(held.items()) if isinstance(held, Mapping) else held
        found = [self.of(each, depth + 1) for each in inner]
        return mix(2, *(sorted(found) if isinstance(leaf, set | frozenset) else found))

    def _of_tensor(self, tensor: Tensor) -> int:
        number = self._of_batch(tensor)
        if number is not None:
            return number
        kind = type(tensor)
        name = self._name_of(tensor) if kind is not Tensor or tensor.requires_grad else None
        if name is not None or kind not in (Tensor, nn.Parameter):  # a parameter, or what another rank has
            return _name(name or "")
        if not tensor.is_cpu:
            return self._of_earlier(tensor)
        version = version_of(tensor)
        mark = getattr(tensor, "_pipe_values", None)
        if mark is None or version is None or mark[:2] != (self._numbers.token, version):
            mark = tensor._pipe_values = self._numbers.token, version, _values(tensor)  # type: ignore[attr-defined]
        return int(mark[2])

    def _of_earlier(self, tensor: Tensor) -> int:
        """What a tensor on a device went through in earlier runs of the batch, if they have made or changed it."""
        derived, number = getattr(tensor, "_pipe_number", (-1, 0))
        if derived >= self.since:
            return mix(1, number)
        token, number, varies = getattr(tensor, "_pipe_lineage", (-1, 0, False))
        if token < self.since:
            return mix(*tensor.shape)
        return mix(2, number) if varies else int(number)  # what each run makes alike may be made once


@lru_cache(maxsize=1024)
def _of_plain(leaf: Any) -> int:
    if isinstance(leaf, float) and not leaf.is_integer():
        return zlib.crc32(f"{leaf:.9g}".encode())  # rounded; all NaN read alike
    if isinstance(leaf, int | float):
        # as an int, since 1 and 1.0 are as good; Python's hashes of -1 and -2 are the same
        return hash(leaf) if leaf >= 0 else zlib.crc32(b"%d" % int(leaf))
    if isinstance(leaf, str):
        return zlib.crc32((leaf.partition(":")[0] if leaf.startswith("cuda") else leaf).encode())
    return zlib.crc32(repr(leaf).encode())


def _values(tensor: Tensor) -> int:
    if tensor.is_mkldnn or functorch_active():  # inside torch.func tensors have no values to read
        return mix(*tensor.shape)
    with DisableTorchFunction(), torch.no_grad():
        held = tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor
        held = held if held.layout is torch.strided else held.values()
        flat = held.detach().resolve_conj().resolve_neg().reshape(-1)
        flat = flat[:: 1 + flat.numel() // _SAMPLED].contiguous()
        if flat.is_floating_point() and bool(flat.isnan().any()):
            flat = torch.where(flat.isnan(), torch.full((), torch.nan, dtype=flat.dtype), flat)
        flat = flat.as_strided(flat.shape, (1,))  # one element may have any stride, and no view as bytes then
        return mix(zlib.crc32(flat.view(torch.uint8).numpy().data), *tensor.shape)


@cache
def _name(*names: str) -> int:
    # not ``hash``, which differs between processes for the same text
    return zlib.crc32(" ".join(names).encode())
