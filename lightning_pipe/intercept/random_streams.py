"""Random streams that do not depend on which rank computes what.

Every rank runs the user's step, so code outside layers must draw the same numbers everywhere, while each layer draws
numbers of its own. All streams derive from the batch's seed, the micro-batch and a key, never from what ran before.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from lightning_pipe.intercept import library_draws
from lightning_pipe.intercept.library_draws import LibraryDraws
from lightning_pipe.tensor_spec import numbered


def mix(*parts: int) -> int:
    """A seed derived from integers, the same in every process (hashes of integer tuples are not salted).

    Example:
        >>> mix(1, 2) == mix(1, 2), mix(1, 2) == mix(2, 1)
        (True, False)
    """
    return hash(parts) & 0x7FFF_FFFF_FFFF_FFFF


def _states(generators: Sequence[torch.Generator]) -> list[Tensor]:
    return [generator.get_state() for generator in generators]


def _seed(generators: Sequence[torch.Generator], seed: int) -> None:
    for generator in generators:
        generator.manual_seed(seed)


def _restore(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


class _Isolated:
    """Gives the code inside its own stream and puts the surrounding stream back. A class, for speed."""

    __slots__ = ("_call", "_libraries", "_seed", "_states", "_streams")

    def __init__(self, streams: RandomStreams, seed: int, call: int | None) -> None:
        self._streams, self._seed, self._call = streams, seed, call

    def __enter__(self) -> None:
        streams, seed = self._streams, self._seed
        self._states = _states(streams.generators)
        _seed(streams.generators, seed)
        if self._call in streams.quiet:
            self._libraries = None
        else:
            self._libraries = library_draws.states()
            library_draws.seed_both(seed)

    def __exit__(self, *_: object) -> None:
        streams = self._streams
        if streams.drew is not None:
            streams.drew |= streams.draws_since(self._seed)
        _restore(streams.generators, self._states)
        if self._libraries is not None:
            if streams.draws is not None and self._call is not None:
                streams.draws.watch(self._call, streams.number, self._seed)
            library_draws.restore(self._libraries)


class RandomStreams:
    """The random streams of one batch.

    Micro-batches are numbered over all replicas, in the order in which samples are dealt out to them: masks do not
    depend on how many replicas share the micro-batches.

    Args:
        seed: the batch's seed, the same on all ranks of all pipelines.
        device: where the layers run; its generator is seeded beside the CPU's.
        replica: the number of this pipeline among those side by side.
        replicas: how many there are.
        draws: which calls draw from Python's and NumPy's generators; ``None``: nobody knows.

    Attributes:
        draws: as given.
        number: that of the batch, from 1 on; 0 where nobody counts.
        generators: the generators of torch that code outside layers draws from.
        quiet: the calls that have streams of torch alone.
        drew: what `noting_draws` notes; ``None``: nobody asks whether anything is drawn.
    """

    def __init__(
        self, seed: int, device: torch.device, replica: int = 0, replicas: int = 1, draws: LibraryDraws | None = None
    ) -> None:
        self.seed, self._replica, self._replicas, self.draws = seed, replica, replicas, draws
        self.number, self.quiet = (0, frozenset[int]()) if draws is None else draws.begin_batch()
        self.drew: set[bool] | None = None
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            self.generators.append(torch.cuda.default_generators[numbered(device).index])

    def isolated(self, micro_batch: int, *key: int) -> _Isolated:
        """A context with the stream of ``key``; the stream outside goes on as if nothing had happened."""
        call = None if self.draws is None else self.draws.call_of(key)
        return _Isolated(self, mix(self.seed, micro_batch * self._replicas + self._replica, *key), call)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Put all generators back after a batch: torch's, Python's and numpy's."""
        # Always: each run of the step has seeded them, drawn from or not, and whether code outside drew since the last
        # batch is in the state alone.
        states, libraries = _states(self.generators), library_draws.states()
        try:
            yield
        finally:
            _restore(self.generators, states)
            library_draws.restore(libraries)

    @contextmanager
    def noting_draws(self) -> Iterator[set[bool]]:
        """Around a run: what it yields has True afterwards if anything was drawn, or some code ever draws in Python."""
        drew = {self.draws is not None and self.draws.any}
        self.drew = None if self.draws is None else drew  # else other threads seed the generators, too
        yield drew
        self.drew = None

    def draws_since(self, seed: int) -> set[bool]:
        """Has True if torch's generators are not as they were when they were seeded; they are so afterwards."""
        now = _states(self.generators)
        _seed(self.generators, seed)
        return {not torch.equal(*pair) for pair in zip(now, _states(self.generators), strict=True)}

    def seed_user_code(self, micro_batch: int) -> None:
        """Start the stream of the user's code outside layers for one run over ``micro_batch``."""
        self._begun_with = mix(self.seed, micro_batch * self._replicas + self._replica)
        _seed(self.generators, self._begun_with)
        library_draws.seed_both(self._begun_with)

    def has_drawn(self) -> bool:
        """Whether code outside layers has drawn since `seed_user_code`, at the end of what that has begun."""
        return any(self.draws_since(self._begun_with)) or library_draws.moved_since(self._begun_with)

    def end_user_code(self) -> None:
        """A run that `seed_user_code` began has ended."""
        if self.drew is not None:
            self.drew |= self.draws_since(self._begun_with)
        if self.draws is not None:
            self.draws.end_run(self._begun_with)

    def state(self) -> tuple[object, ...]:
        """The state of all generators, to be compared: whether numbers have been drawn."""
        return tuple(state.numpy().tobytes() for state in _states(self.generators)), pickle.dumps(
            library_draws.states()
        )


Stream = Callable[[], AbstractContextManager[None]]
"""Gives a context with a random stream, from its beginning on."""


class Surroundings:
    """What of the user's step is around the code that runs now: layers, hooks in them, checkpoints; its random stream.

    Args:
        isolated: gives a context with the micro-batch's random stream of a key.

    Attributes:
        inside: whether a layer, an outside module or the engine's own code runs.
        checkpoint: of what the activation checkpoint runs the random streams, in order.
        inner_hook: whether a forward hook on a part of a layer runs.
    """

    def __init__(self, isolated: Callable[..., AbstractContextManager[None]]) -> None:
        self._isolated = isolated
        self.inside = False
        self.checkpoint: list[Stream] | None = None
        self.inner_hook = False

    def stream(self, *key: int) -> AbstractContextManager[None]:
        """The random stream of ``key``; without a key that of the code around, which goes on.

        A checkpoint runs its code again in the backward pass, so it notes the streams in order; hooks inside its layers
        run again as parts of these.
        """
        if self.checkpoint is None:
            return self._isolated(*key) if key else nullcontext()
        if self.inner_hook:
            return nullcontext()
        # Made anew by each call: the checkpoint enters it once now and once more in its second run.
        stream = partial(self._isolated, *key) if key else nullcontext
        self.checkpoint.append(stream)
        return stream()
