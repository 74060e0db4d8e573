"""Broadcasts within a pipeline that do not block the sender.

A collective broadcast over Gloo ends at its source when all others have come to it. In an asynchronous schedule the
last-stage rank is calls ahead of the first stage, in a stream of evaluations the first stage is batches ahead.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from lightning_pipe.transport.base import OBJECT_TAGS, Transport
from lightning_pipe.transport.work import Work

PURPOSES = BATCHES, REPORTS = range(2)
"""What is sent: batches that are loaded, and reports about batches."""
# Above the tags of all micro-batches, below that of collectives.
_HIGHEST = OBJECT_TAGS - 2


class NonBlockingBroadcast:
    """Sends an object to each of the other processes of the pipeline, and waits for arrivals a few batches later.

    Args:
        transport: this process's transport.

    Attributes:
        ahead: batches that the source may be ahead of its receivers.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.ahead = 2
        self._sent: deque[list[Work]] = deque([[]])  # of each batch

    def share(self, obj: Any, source: int, purpose: int) -> Any:
        """The object of one process, on all ranks of its pipeline; the others wait for what it sends for a purpose."""
        transport, tag = self._transport, _HIGHEST - purpose
        if transport.process != source:
            return transport.receive_object_from(source, tag)
        others = [process for process in transport.peers if process != source]
        self._sent[-1].append(transport.send_object_to(others, obj, tag))
        return obj

    def end_batch(self) -> None:
        """A batch ends: what was sent ``ahead`` batches before it must have arrived."""
        self._sent.append([])
        while len(self._sent) > self.ahead + 1:
            for work in self._sent.popleft():  # without a limit a slow receiver would fill the source's memory
                work.wait()

    def flush(self) -> None:
        """Wait until everything has arrived."""
        for work in (work for works in self._sent for work in works):
            work.wait()
        self._sent = deque([[]])
