"""Runs evaluation steps that call the layers several times: one rank computes at a time."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_pipe.engine.batch import Batch
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.turns.run import TurnRun
from lightning_pipe.parameters.deferred_batchnorm import begin_pass
from lightning_pipe.transport.work import Work

if TYPE_CHECKING:
    from lightning_pipe.engine.pipeline import Pipeline

_TAG = (1 << 29) - 1
"""Above those of broadcasts that do not block: batches of a stream may be under way while ranks take turns."""


class Turns:
    """Runs steps over a pipeline whose ranks take turns, and brings what they tell to the others.

    Args:
        pipeline: the module over the ranks.

    Attributes:
        rank: this rank.
        ranks: how many there are.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._transport = pipeline, pipeline.transport
        self.rank, self.ranks = pipeline.transport.rank, pipeline.transport.topology.ranks
        self._sending: list[Work] = []
        spans = enumerate(pipeline.stage_layers)
        self._rank_of_layer = [pipeline.placement[0, stage] for stage, span in spans for _ in span]
        self._places: dict[Any, int] = {}

    def run(self, batch: Batch) -> dict[int, Any]:
        """Run the step for all micro-batches; returns what it returned, on the rank with the loss of pipe 0."""
        interceptor, last = self._pipeline.executor.stages.interceptor, self._pipeline.loss_ranks[0]
        interceptor.state.begin_batch()
        self._sending.clear()  # those of a batch that has failed
        for micro_batch in range(len(batch.micro_batches)):
            run = TurnRun(
                self._pipeline.names,
                self._rank_of_layer,
                last,
                self,
                partial(batch.streams.isolated, micro_batch),
                batch.streams.torch.all,
                interceptor.cache,
            )
            inputs = batch.slice(micro_batch)
            batch.streams.seed_user_code(micro_batch)
            run.tracker.digest.thorough = batch.thorough
            begin_pass(0)
            result = interceptor.follow(run, partial(batch.step, micro_batch, inputs))
            batch.streams.end_user_code()
            while self._sending:
                self._sending.pop().wait()
            if self.rank == last:
                batch.keep(micro_batch, None, result)
        return batch.results

    def place(self, name: str, tensors: Iterable[Tensor], holder: int) -> int:
        """The rank that runs code with some parameters and buffers: always the same one, as long as it holds them."""
        found = list(tensors)
        owners = self._pipeline.ownership.ranks_with(found)
        if owners is None:
            return holder
        if not owners:
            raise CutError(
                f"'{name or 'a function'}' needs parameters that no rank holds together.",
                hint="Use each of them where its layer runs.",
            )
        # A function has no name of its own: the parameters that it uses stand for it.
        key = name or tuple(map(id, found))
        if self._places.get(key) not in owners:
            self._places[key] = holder if holder in owners else owners[0]
        return self._places[key]

    def send(self, obj: Any, rank: int) -> None:
        """Start to send an object."""
        self._sending.append(self._transport.send_object(obj, rank, _TAG))

    def receive(self, rank: int) -> Any:
        """The next object that a rank sends."""
        return self._transport.receive_object(rank, _TAG)
