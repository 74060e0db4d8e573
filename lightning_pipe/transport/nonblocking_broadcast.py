"""Broadcasts within a pipeline that do not block the sender.

A collective broadcast over Gloo ends at its source when all others have come to it. In an asynchronous schedule the
last-stage rank is calls ahead of the first stage, and would wait for it in every batch.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from lightning_pipe.transport.base import Transport, Work

# Above the tags of all micro-batches.
_TAG = (1 << 29) - 2


class NonBlockingBroadcast:
    """Sends an object to each of the other processes of the pipeline, and waits for arrivals a few calls later.

    Args:
        transport: this process's transport.
        ahead: calls of ``training_step`` that the source may be ahead of its receivers.
    """

    def __init__(self, transport: Transport, ahead: int) -> None:
        self._transport = transport
        self._ahead = ahead
        self._sent: deque[list[Work]] = deque([[]])  # of each call

    def share(self, obj: Any, source: int, members: tuple[int, ...]) -> Any:
        """The object of one process, on all members; the others wait for it."""
        locate = self._transport.topology.locate
        if self._transport.process != source:
            return self._transport.receive_object(locate(source)[1], _TAG)
        peers = [locate(member)[1] for member in members if member != source]
        self._sent[-1] += [self._transport.send_object(obj, peer, _TAG) for peer in peers]
        return obj

    def end_call(self) -> None:
        """A call of ``training_step`` ends: what was sent more than ``ahead`` calls ago must have arrived."""
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
