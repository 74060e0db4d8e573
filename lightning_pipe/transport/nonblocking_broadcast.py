"""Broadcasts within a pipeline that do not block the sender.

A collective broadcast over Gloo ends at its source when all others have come to it. In an asynchronous schedule the
last-stage rank is calls ahead of the first stage, and would wait for it in every batch. In an evaluation that streams
the first stage is batches ahead of the last one.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from lightning_pipe.transport.base import OBJECT_TAGS, Transport, Work

# Above the tags of all micro-batches, below that of collectives.
_HIGHEST = OBJECT_TAGS - 2


class NonBlockingBroadcast:
    """Sends an object to each of the other processes of the pipeline, and waits for arrivals a few calls later.

    Args:
        transport: this process's transport.
        ahead: calls of ``training_step``, or batches, that the source may be ahead of its receivers.
        number: tells the broadcasts of a process apart: those with one number are received in the order in which they
            were sent, those with different numbers in any order.
    """

    def __init__(self, transport: Transport, ahead: int, number: int = 0) -> None:
        self._transport = transport
        self._tag = _HIGHEST - number
        self._ahead = ahead
        self._sent: deque[list[Work]] = deque([[]])  # of each call

    def share(self, obj: Any, source: int, members: tuple[int, ...]) -> Any:
        """The object of one process, on all members; the others wait for it."""
        locate = self._transport.topology.locate
        if self._transport.process != source:
            return self._transport.receive_object(locate(source)[1], self._tag)
        peers = [locate(member)[1] for member in members if member != source]
        self._sent[-1].append(self._transport.send_object_to(obj, peers, self._tag))
        return obj

    def end_call(self) -> None:
        """A call of ``training_step``, or a batch, ends: what was sent ``ahead`` calls before it must have arrived."""
        self._sent.append([])
        while len(self._sent) > self._ahead + 1:
            for work in self._sent.popleft():  # without a limit a slow receiver would fill the source's memory
                work.wait()

    def flush(self) -> None:
        """Wait until everything has arrived."""
        while self._sent:
            for work in self._sent.popleft():
                work.wait()
        self._sent.append([])
