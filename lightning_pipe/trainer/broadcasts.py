"""Objects of some ranks of a pipeline, on all of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning_pipe.engine.pipeline import Pipeline

NUMBERS = STREAMED, BATCHES, REPORTS, ENDS = range(1, 5)
"""The numbers of broadcasts in which the source does not wait for the others; see `NonBlockingBroadcast`."""

Broadcast = Callable[[Any, int], Any]
"""Takes an object and the process whose object counts; returns that object on all ranks of the pipeline."""


def from_ranks(pipeline: Pipeline, ranks: Sequence[int], obj: Any, broadcast: Broadcast | None = None) -> list[Any]:
    """The objects of some ranks, on all ranks of the pipeline. Collective over it.

    Args:
        pipeline: the module over the ranks.
        ranks: the ranks whose objects are wanted.
        obj: this rank's object; any value on the other ranks.
        broadcast: sends them; by default all ranks wait for each other.
    """
    transport = pipeline.transport
    send = broadcast or partial(transport.broadcast_object, members=pipeline.pipeline_members)
    return [send(obj, transport.topology.process(transport.replica, rank)) for rank in ranks]
