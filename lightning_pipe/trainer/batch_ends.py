"""What all processes know alike at the end of every training batch: whether to stop, and what signals ask for.

A rank's request goes along with what it sends to later stages, so that the rank with the last stage learns of it, and
at the end of the batch that rank tells the others what holds for all::

    stage 0    asks to stop behind batch 4 |  sends batch 5, with the request ->            stops after batch 5
    stage 1                                |                  -> batch 5, with the request  tells: stop after batch 5

Nobody waits for an answer. What all ranks ask for, or the rank with the last stage, or another one before it sends its
part of the batch, holds in this batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.trainer.broadcasts import ENDS
from lightning_pipe.trainer.signals import Signals
from lightning_pipe.trainer.world import World
from lightning_pipe.transport.nonblocking_broadcast import NonBlockingBroadcast

_BITS = 3
"""A request to stop, to end by a signal, and to save and be requeued."""


class BatchEnds:
    """Agrees at the end of every training batch.

    Args:
        world: the processes.
        pipeline: the module over the ranks.
        trainer: the Trainer, whose strategy has been told of signals, and is told what all processes are to do.
    """

    def __init__(self, world: World, pipeline: Pipeline, trainer: Any) -> None:
        self._world, self._pipeline, self._trainer = world, pipeline, trainer
        self._signals: Signals = trainer.strategy.processes.signals
        self._channel = NonBlockingBroadcast(pipeline.transport, ahead=2, number=ENDS)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Around a training: messages to later stages say what this process asks for."""
        exchange = self._pipeline.executor.exchange
        exchange.requests, self._signals.told = 0, [False, False]
        exchange.asking = lambda: _bits([self._trainer.should_stop, *self._signals.asked])
        try:
            yield
        finally:
            exchange.asking = int

    def agree(self, stop: bool) -> bool:
        """Whether all processes stop after this batch.

        Args:
            stop: whether this process has been asked to.
        """
        exchange, source = self._pipeline.executor.exchange, self._pipeline.loss_process
        own = _bits([stop, *self._signals.asked])
        asked = own | exchange.requests
        if self._pipeline.transport.process == source:
            asked = self._of_replicas(asked)
        asked = self._channel.share(asked, source, self._pipeline.pipeline_members)
        self._channel.end_call()
        # what the last stage does not know yet goes along with the next batch
        exchange.requests = own & ~asked
        stop, *self._signals.told = [bool(asked >> bit & 1) for bit in range(_BITS)]
        return stop

    def _of_replicas(self, asked: int) -> int:
        members = self._world.replica_members
        if len(members) == 1:
            return asked
        flags = torch.tensor([asked >> bit & 1 for bit in range(_BITS)])
        self._pipeline.transport.all_reduce(flags, members, "max").wait()
        return _bits(flags.bool().tolist())


def _bits(flags: list[bool]) -> int:
    return sum(int(flag) << bit for bit, flag in enumerate(flags))
