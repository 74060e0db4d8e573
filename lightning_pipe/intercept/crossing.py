"""One hop of a micro-batch over a boundary: what goes from a stage to a later one, and what comes back.

The same two types lie at both ends, whether the stages are on one rank or on two::

    stage s                                                             a later stage
    StageRun ends        crossings_of                                   StageRun.arrive, Incoming
    at its cut      -->  Crossing  ---->  BoundaryExchange  ---->  Crossing  -->  the run goes on
                         with its graph   (or `Crossing.detached`)      without a graph
    Stages.backward <--  Returned  <----  BoundaryExchange  <----  Returned  <--  Stages.backward

The engine's other types about a hop live longer or shorter than these: a `BoundaryKey` names the hop in tables, a
`BoundaryPlan` holds for many micro-batches, and a `Transfer` tells both ends after the backward pass what the next
plan is to send. `Incoming` is the node of the graph through which gradients leave it: it lives as long as the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import AGAIN, LiveTensor, RunRecord
from lightning_pipe.intercept.numbers import SAME_PATH
from lightning_pipe.intercept.placeholder import Placeholder
from lightning_pipe.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from lightning_pipe.intercept.stage_run import StageRun


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

    def copied(self) -> Crossing:
        """Copies with the strides of what has left, which ``clone()`` alone does not give to what is expanded."""
        specs = {entry.number: entry.spec for entry in self.path.entries}
        tensors = {number: specs[number].lay_out(value.clone()) for number, value in self.tensors.items()}
        return replace(self, tensors=tensors)

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


def crossings_of(run: StageRun) -> dict[int, Crossing]:
    """What leaves a stage at its cut, by the stage that receives it: the numbered tensors that are alive."""
    stage, tracker, routed = run.stage, run.tracker, run.layer_calls.routed
    alive = [
        (number, tensor)
        for number, tensor in sorted(tracker.numbers.alive())  # of which no two are equal
        if not isinstance(tensor, (Placeholder, nn.Parameter)) and number not in tracker.numbers.unfilled
    ]
    for _, tensor in alive:  # all of them: which ones the next stages use is known after the batch alone
        check_plain(tensor, f"crosses the cut before layer '{stage.next_name}'")
    # What came as copies of one memory still stands for one memory where it goes next.
    shared = overlapping([tensor for _, tensor in alive]) | {id(tensor) for tensor, *_ in run.copied}
    calls, next_stage = tuple(tracker.calls), stage.stage + 1
    leaving: dict[int, list[tuple[LiveTensor, Tensor]]] = {next_stage: []}
    for number, tensor in alive:
        entry = entry_of(number, tensor, id(tensor) in shared or tracker.in_place.is_lent(tensor))
        leaving.setdefault(routed.get(number, next_stage), []).append((entry, tensor))
    return {
        to: Crossing(
            RunRecord(calls, tuple(entry for entry, _ in pairs)),
            {entry.number: tensor for entry, tensor in pairs},
            tuple(tracker.digest.words[: len(calls)]),
        )
        for to, pairs in leaving.items()
    }


def check_plain(tensor: Tensor, where: str) -> None:
    """Raise if a tensor would come out of a message as something else; ``where`` says what it does."""
    if type(tensor) is not Tensor or tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested tensor" if tensor.is_nested else f"{type(tensor).__qualname__} with {tensor.layout}"
        raise CutError(
            f"a {kind} {where}: only torch.Tensor with torch.strided travels.",
            hint="Use x.as_subclass(torch.Tensor) before the layers, x.to_dense() or a padded tensor with its lengths.",
        )


def entry_of(number: int, tensor: Tensor, shared: bool) -> LiveTensor:
    """The entry of a tensor in the path of the cut; see `LiveTensor`."""
    spec = TensorSpec.of(tensor)
    # A view made under no_grad says that it requires a gradient and has none to give (torch 2.13).
    detached = tensor._base is not None and tensor.grad_fn is None
    return LiveTensor(number, spec, tensor.requires_grad and not detached, shared or spec.overlaps)


def overlapping(tensors: Sequence[Tensor]) -> set[int]:
    """Those that share memory with another, by ``id``. To come out of one message is not to share memory."""
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors if len(tensors) > 1 else ():
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    found: set[int] = set()
    for together in by_storage.values():
        if len(together) == 1:
            continue
        reached, last = 0, 0  # sorted by where they begin, each is compared with the one that reaches furthest
        for start, end, tensor_id in sorted((*_extent(tensor), id(tensor)) for tensor in together if tensor.numel()):
            if start < reached:
                found |= {last, tensor_id}
            if end > reached:
                reached, last = end, tensor_id
    return found


def _extent(tensor: Tensor) -> tuple[int, int]:
    """From where to where a tensor reaches in its storage, in bytes."""
    elements = 1 + sum((int(n) - 1) * int(step) for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + elements * tensor.itemsize
