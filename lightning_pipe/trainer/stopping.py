"""What all processes know alike behind every training batch: whether to stop, and what signals ask for.

One process alone may have set ``trainer.should_stop``, in any hook, or have got a signal. Its request goes along with
what it sends to later stages, so that the rank with the last stage learns of it, and at the end of the batch that rank
tells the others what holds for all::

    stage 0    asks to stop behind batch 4 |  sends batch 5, with the request ->            stops after batch 5
    stage 1                                |                  -> batch 5, with the request  tells: stop after batch 5

Nobody waits for an answer. What all ranks ask for, or the rank with the last stage, or another one before it sends its
part of the batch, holds in this batch. Outside of batches all processes agree wherever Lightning's loops ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.patches import replaced
from lightning_pipe.trainer.signals import Signals
from lightning_pipe.trainer.world import World
from lightning_pipe.transport.nonblocking_broadcast import ENDS, NonBlockingBroadcast

_BITS = 3
"""A request to stop, to end by a signal, and to save and be requeued."""


class Stopping:
    """Calls methods of Lightning's training loops, and agrees before or after them.

    Args:
        trainer: the Trainer.
        world: the processes.
        pipeline: the module over the ranks.
        signals: what signals ask for here; is told what they ask for on any process.
        channel: sends what holds within the pipeline.
    """

    def __init__(
        self, trainer: Any, world: World, pipeline: Pipeline, signals: Signals, channel: NonBlockingBroadcast
    ) -> None:
        self._trainer, self._world, self._pipeline, self._signals = trainer, world, pipeline, signals
        self._channel = channel
        self._agreed = self._withheld = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Around a training. With an asynchronous schedule `Streaming` agrees behind batches instead."""
        fit_loop, exchange = self._trainer.fit_loop, self._pipeline.executor.exchange
        places: list[tuple[Any, str, Callable[..., Any]]] = [
            (fit_loop, "run", self._before),
            (fit_loop, "on_run_start", self._after),
            (fit_loop, "on_advance_start", self._after),
            (fit_loop, "on_advance_end", self._after),
            (fit_loop.epoch_loop.val_loop, "run", self._after),
        ]
        if self._pipeline.asynchronous is None:
            places.append((fit_loop.epoch_loop, "on_advance_end", self.end_batch))
            exchange.requests, self._signals.told = 0, [False, False]
            exchange.asking = lambda: self._asked(self._trainer.should_stop)
        with ExitStack() as changed:
            changed.callback(setattr, exchange, "asking", int)
            for owner, name, wrapper in places:
                # Without a gate: others replace some of these too, and a gate would lead the wrapper back to itself.
                changed.enter_context(replaced(owner, name, partial(wrapper, getattr(owner, name)), gated=False))
            yield

    def _before(self, method: Callable[..., Any], *arguments: Any) -> Any:
        self.agree()
        return method(*arguments)

    def _after(self, method: Callable[..., Any], *arguments: Any) -> Any:
        result = method(*arguments)
        self.agree()
        return result

    def end_batch(self, method: Callable[..., Any], *arguments: Any) -> None:
        """In the place of ``on_advance_end``, which asks whether to stop, as the loop does after it."""
        self._agree(self._of_batch)
        method(*arguments)
        self.withhold()  # a learning rate scheduler, say, has set it

    def withhold(self) -> None:
        """A process that has been asked to stop must not leave before the others know."""
        if self._trainer.should_stop and not self._agreed:
            self._trainer.should_stop, self._withheld = False, True

    def take(self) -> bool:
        """Whether this process has been asked to stop."""
        asked, self._withheld = bool(self._trainer.should_stop or self._withheld), False
        return asked

    def follow(self, agreed: bool) -> None:
        """Stop, or go on, as the processes have agreed."""
        self._trainer.should_stop = self._agreed = agreed

    def agree(self) -> None:
        """Agree with all processes, where all of them are at the same batch. Collective over the world."""
        self._agree(lambda stop: self._world.agree(stop, unanimous=False))

    def _agree(self, agree: Callable[[bool], bool]) -> None:
        own = self.take()
        self.follow(agree(own))
        # it may be known to all after the next batch only
        self._withheld = own and not self._agreed

    def _of_batch(self, stop: bool) -> bool:
        """Whether all processes stop after this batch, as the rank with the last stage tells them."""
        exchange, source = self._pipeline.executor.exchange, self._pipeline.loss_process
        own = self._asked(stop)
        asked = own | exchange.requests
        if self._pipeline.transport.process == source:
            topology = self._pipeline.transport.topology
            for members in (self._world.replica_members, topology.tensor_processes(source)):
                asked = self._of_all(asked, members)
        asked = self._channel.share(asked, source, ENDS)
        # what the last stage does not know yet goes along with the next batch
        exchange.requests = own & ~asked
        stop, *self._signals.told = [bool(asked >> bit & 1) for bit in range(_BITS)]
        return stop

    def _of_all(self, asked: int, members: tuple[int, ...]) -> int:
        if len(members) == 1:
            return asked
        flags = torch.tensor([asked >> bit & 1 for bit in range(_BITS)])
        self._pipeline.transport.all_reduce(flags, members, "max").wait()
        return _bits(flags.bool().tolist())

    def _asked(self, stop: bool) -> int:
        return _bits([stop, *self._signals.asked])


def _bits(flags: list[bool]) -> int:
    return sum(int(flag) << bit for bit, flag in enumerate(flags))
