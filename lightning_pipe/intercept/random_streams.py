"""Random streams that do not depend on which rank computes what.

Every rank runs the user's step, so code outside layers must draw the same numbers everywhere, while each layer draws
numbers of its own. All streams derive from the batch's seed, the micro-batch and a key, never from what ran before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

from lightning_pipe.intercept.generators import Draws, TorchGenerators, all_draws


def mix(*parts: int) -> int:
    """A seed derived from integers, the same in every process (hashes of integer tuples are not salted).

    Example:
        >>> mix(1, 2) == mix(1, 2), mix(1, 2) == mix(2, 1)
        (True, False)
    """
    return hash(parts) & 0x7FFF_FFFF_FFFF_FFFF


class _Isolated:
    """Gives the code inside its own stream and puts the surrounding stream back. A class, for speed."""

    __slots__ = ("_call", "_draws", "_number", "_seed", "_states")

    def __init__(self, draws: Sequence[Draws], seed: int, number: int, call: int | None) -> None:
        self._draws, self._seed, self._number, self._call = draws, seed, number, call

    def __enter__(self) -> None:
        self._states = [each.generators.states() for each in self._draws]
        for each in self._draws:
            each.generators.seed(self._seed)

    def __exit__(self, *_: object) -> None:
        for each, states in zip(self._draws, self._states, strict=True):
            if self._call is not None:
                each.watch(self._call, self._number, self._seed)
            each.generators.restore(states)


_AS_IT_IS = nullcontext()


class RandomStreams:
    """The random streams of one batch.

    Micro-batches are numbered over all replicas, in the order in which samples are dealt out to them: masks do not
    depend on how many replicas share the micro-batches.

    Args:
        seed: the batch's seed, the same on all ranks of all pipelines.
        device: where the layers run; its generator is seeded beside the CPU's.
        replica: the number of this pipeline among those side by side.
        replicas: how many there are.
        draws: what is known of the calls' draws; none: nothing is, and each of them has its streams.

    Attributes:
        number: that of the batch among those that the same ``draws`` have seen, from 1 on.
        torch: the generators of torch.
    """

    def __init__(
        self, seed: int, device: torch.device, replica: int = 0, replicas: int = 1, draws: Sequence[Draws] = ()
    ) -> None:
        self.seed, self._replica, self._replicas = seed, replica, replicas
        self.torch, self._draws, self._watches = TorchGenerators(device), draws or all_draws(device), bool(draws)
        begun = [each.begin_batch() for each in self._draws]
        self.number = begun[0][0]
        # with the calls that have no streams of theirs
        self._alone = [(each, quiet) for each, (_, quiet) in zip(self._draws, begun, strict=True)]
        self._silent = frozenset.intersection(*(quiet for _, quiet in self._alone))

    def isolated(self, micro_batch: int, *key: int) -> AbstractContextManager[None]:
        """A context with the stream of ``key``; the stream outside goes on as if nothing had happened."""
        # keys begin with the number of a layer, that of a module outside them, which is below -1, or -1 for other code
        call = key[0] if self._watches and key[0] != -1 else None
        if call in self._silent:  # as mostly
            return _AS_IT_IS
        draws = [each for each, quiet in self._alone if call not in quiet]
        return _Isolated(draws, mix(self.seed, micro_batch * self._replicas + self._replica, *key), self.number, call)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Put all generators back after a batch: torch's, Python's and numpy's."""
        # Always: each run of the step has seeded them, drawn from or not, and whether code outside drew since the last
        # batch is in the state alone.
        states = [(each.generators, each.generators.states()) for each in self._draws]
        try:
            yield
        finally:
            for generators, former in states:
                generators.restore(former)

    def seed_user_code(self, micro_batch: int) -> None:
        """Start the stream of the user's code outside layers for one run over ``micro_batch``."""
        self._begun_with = mix(self.seed, micro_batch * self._replicas + self._replica)
        for each in self._draws:
            each.generators.seed(self._begun_with)

    def has_drawn(self) -> bool:
        """Whether code outside layers has drawn since `seed_user_code`, at the end of what that has begun."""
        return any(each.generators.moved_since(self._begun_with) for each in self._draws)

    def end_user_code(self) -> None:
        """A run that `seed_user_code` began has ended."""
        for each in self._draws if self._watches else ():
            each.end_run(self._begun_with)


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
