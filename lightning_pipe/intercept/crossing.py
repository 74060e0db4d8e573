"""One hop of a micro-batch over a boundary: what goes from a stage to a later one, and what comes back.

The same two types lie at both ends, whether the stages are on one rank or on two::

    stage s                                                             a later stage
    StageRun ends        outgoing.crossings_of                          StageRun.arrive, Incoming
    at its cut      -->  Crossing  ---->  BoundaryExchange  ---->  Crossing  -->  the run goes on
                         with its graph   (or `Crossing.detached`)      without a graph
    Stages.backward <--  Returned  <----  BoundaryExchange  <----  Returned  <--  Stages.backward

The engine's other types about a hop live longer or shorter than these: a `BoundaryKey` names the hop in tables, a
`BoundaryPlan` holds for many micro-batches, and a `Transfer` tells both ends after the backward pass what the next
plan is to send. `Incoming` is the node of the graph through which gradients leave it: it lives as long as the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import AGAIN, RunRecord
from lightning_pipe.intercept.numbers import SAME_PATH


@dataclass(frozen=True, eq=False)
class Crossing:
    """What leaves a stage at its cut, or has come to a later one.

    Args:
        path: the calls up to the cut and the tensors that are alive there.
        tensors: by number, the tensors themselves, in the order of the path's entries. Those that leave have their
            graph. Of those that have come, some may be missing: both ends had agreed that nothing needs them.
        words: what the calls were given; see `Digest`. Where there are none, nothing is compared.
    """

    path: RunRecord
    tensors: dict[int, Tensor]
    words: tuple[int, ...] = ()

    @property
    def differentiable(self) -> tuple[int, ...]:
        """The numbers of the tensors that need a gradient."""
        return tuple(e.number for e in self.path.entries if e.requires_grad and e.number in self.tensors)

    def detached(self) -> Crossing:
        """The same memory without the graph: what another stage of this rank gets."""
        return replace(self, tensors={number: tensor.detach() for number, tensor in self.tensors.items()})

    def emptied(self) -> Crossing:
        """What a skip carries for a micro-batch that stashed no tensor."""
        return replace(self, path=RunRecord(self.path.calls, ()), tensors={})

    def laid_out(self) -> Crossing:
        """The same values with the strides that the tensors had where they left."""
        specs = {entry.number: entry.spec for entry in self.path.entries}
        tensors = {number: specs[number].lay_out(value) for number, value in self.tensors.items()}
        return replace(self, tensors=tensors)

    def copied(self) -> Crossing:
        """Copies of the values, with the same strides, which ``clone()`` alone does not give to what is expanded."""
        return replace(self, tensors={number: value.clone() for number, value in self.tensors.items()}).laid_out()

    def joined(self, other: Crossing) -> Crossing:
        """This and what an earlier stage sends to the same one: this path has all of its calls, and more.

        Raises:
            CutError: it has not, and no stage in between has ended the run.
        """
        if self.path.calls and self.path.calls[0].name == AGAIN:
            return self
        if self.path.calls[: len(other.path.calls)] != other.path.calls:
            raise CutError(
                "the stage before this one has taken another path than the one that sends a skip connection.",
                hint=SAME_PATH,
            )
        path = RunRecord(self.path.calls, self.path.entries + other.path.entries)
        return replace(self, path=path, tensors=self.tensors | other.tensors)


class Returned(NamedTuple):
    """What goes back: gradients by number, and the numbers of the tensors that were used."""

    gradients: dict[int, Tensor]
    used: frozenset[int]
