"""What the rank with the last stage sends the others in an evaluation: the batches, and a report of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.trainer.broadcasts import STREAMED
from lightning_pipe.transport.nonblocking_broadcast import NonBlockingBroadcast


class EvaluationMessages:
    """Sends batches and reports without waiting for the other ranks.

    A message wakes the process that waits for it, which costs the sender more than to write it. So a batch that nobody
    asks for before the next report may travel with that::

        sent behind     batch 3       batch 4
                        report of 2   report of 3
        holding         batch 4       batch 5

    Args:
        pipeline: the module over the ranks.
        ahead: how many reports later what this rank sends must have arrived.
    """

    def __init__(self, pipeline: Pipeline, ahead: int) -> None:
        self._process, self._members = pipeline.transport.process, pipeline.pipeline_members
        self._channel = NonBlockingBroadcast(pipeline.transport, ahead, STREAMED)
        self._holds = False
        self._held: list[Any] = []
        self._batches: deque[Any] = deque()
        self._reports: deque[Any] = deque()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Around the loading of batches that no other rank asks for before the next report."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False

    def batch(self, obj: Any, source: int) -> Any:
        """What the process that loads has loaded, on all ranks of the pipeline."""
        if self._process != source:
            return self._next_of(self._batches, source)
        self._held.append(obj)
        if not self._holds:
            self._send(source, [])
        return obj

    def report(self, obj: Any, source: int) -> Any:
        """The report of the process with the last stage, on all ranks of the pipeline."""
        if self._process != source:
            return self._next_of(self._reports, source)
        self._send(source, [obj])
        return obj

    def end_call(self) -> None:
        """The step of a batch has been shared; see `NonBlockingBroadcast.end_call`."""
        self._channel.end_call()

    def flush(self) -> None:
        """Wait until the others have got all that was sent. What is held then, nobody asks for."""
        self._channel.flush()

    def _next_of(self, arrived: deque[Any], source: int) -> Any:
        while not arrived:
            batches, reports = self._channel.share(None, source, self._members)
            self._batches += batches
            self._reports += reports
        return arrived.popleft()

    def _send(self, source: int, reports: Sequence[Any]) -> None:
        held, self._held = self._held, []
        self._channel.share((held, reports), source, self._members)
