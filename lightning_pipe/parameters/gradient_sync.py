"""Sums gradients over the processes that hold the same parameters: replicas, copies of a stage, tied weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_pipe.errors import ConfigurationError
from lightning_pipe.local_parts import DATA, TENSOR, dimensions, local, settled, with_local
from lightning_pipe.parameters.zero import BUCKET_BYTES, HolderGroup, OptimizerShards, buckets
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.work import Work

if TYPE_CHECKING:
    from lightning_pipe.sharding.fully_sharded import FullySharded

Key = Any
Owner = Callable[[Parameter], int] | None
# Keys of reductions: what comes first in a group is what is largest.
_DIVIDED, _SHARED, _STAGE = -1, 0, 1

Held = tuple[Parameter, tuple[int, ...], int | None]
"""A parameter of this rank, the pipeline ranks that hold it, ascending, and the stage that alone uses it, if any."""


@dataclass
class _Bucket:
    """A flat buffer with the gradients of some parameters, one after the other."""

    flat: Tensor
    indices: list[int]
    work: Work


@dataclass
class _Entry:
    """The parameters that some processes hold in common, and their reduction if it is under way."""

    parameters: list[Parameter]
    members: tuple[int, ...]
    owners: dict[int, int] | None
    wanted: bool = False
    presence: tuple[Tensor, Work] | None = None
    trainable: list[Parameter] = field(default_factory=list)
    buckets: list[_Bucket] = field(default_factory=list)

    def note_trainable(self) -> None:
        """Add what is trained now. Frozen parameters are so everywhere: all ranks run the user's code that freezes."""
        known = {id(parameter) for parameter in self.trainable}
        self.trainable = [each for each in self.parameters if each.requires_grad or id(each) in known]


class GradientSync:
    """Sums gradients over groups of processes, in buckets and in the background.

    A batch's weight is on its loss, so the sum is all there is to do. Call `start` for a key as soon as its last
    backward pass of the batch is done, and `finish` before the gradients are read. From `start` to `finish` the
    gradients exist in the buckets only (``p.grad`` is ``None``), and after it ``p.grad`` is a view of its bucket:
    at no time are there two copies of all gradients.

    Processes may start their keys in different orders, or leave some to `finish`: what is issued to a group is in the
    order of the keys everywhere. A parameter that has a gradient on some members only counts as zero on the others;
    one that has none anywhere keeps ``None``.

    Sums may go to one member each, the *owner* of the parameter: the others then have no gradient after `finish`, and
    the memory of theirs is free once it is summed (Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.2)::

        gradients of a stage, here      [ a a a b b c c c ]     owners: a, c this process; b another one
        a part for each member          [ a a a c c c ] [ b b ]
        summed by reduce_scatter        [ A A A C C C ]  freed  ->  a.grad, c.grad: views; b.grad: None

    Args:
        transport: moves the buckets.
        bucket_bytes: size from which on a bucket is sent; the size of all but the largest parameters' buckets.
        dtype: in which gradients of wider types are sent and added; ``None``: each in its own. Every gradient is
            rounded once, and so is every sum of two, in the order of a ring or tree. In ``torch.bfloat16`` the sum of
            n is off by at most ``n * 2**-8`` of the sum of magnitudes.

    Attributes:
        dtype: as given; may be set until the first `start`.
        shards: divides the parameters that other processes hold as well over these; nothing until `form`.
        scattered: whether a sum goes to the process that updates the parameter alone; to be set before `form`.
        sharded: has the parameters that processes divide: none has all gradients of its stages; ``None``: none does.
        overlapped: whether a stage that is done is reduced at once; otherwise all wait for `finish`.
    """

    def __init__(
        self, transport: Transport, bucket_bytes: int = BUCKET_BYTES, dtype: torch.dtype | None = None
    ) -> None:
        self.dtype = dtype
        self._transport, self._bucket_bytes = transport, bucket_bytes
        self._entries: dict[Key, _Entry] = {}
        self.shards = OptimizerShards((), transport)
        self.sharded: FullySharded | None = None
        self.scattered = self.overlapped = False

    def form(self, held: Iterable[Held], stages: Iterable[int]) -> None:
        """Take up the parameters of this rank, once it is known who holds them: after the first training batch.

        Those of one stage alone are reduced as soon as the stage is done, all others at the end of the batch.

        Args:
            held: the parameters.
            stages: the stages of this rank.
        """
        by_key: dict[tuple[int, ...], list[Parameter]] = {(_STAGE, stage): [] for stage in stages}
        members, topology = dict[tuple[int, ...], tuple[int, ...]](), self._transport.topology
        for parameter, owners, stage in held:
            divided = DATA in dimensions(parameter)  # the replicas have summed it already
            key = (_DIVIDED, *owners) if divided else (_SHARED, *owners) if stage is None else (_STAGE, stage)
            by_key.setdefault(key, []).append(parameter)
            members[key] = topology.members(self._transport.replica, owners) if divided else topology.holders(owners)
        several = [key for key in sorted(members) if len(members[key]) > 1]
        shared = [HolderGroup(members[key], tuple(by_key[key]), first=key[-1]) for key in several]
        self._transport.open_groups(group.members for group in shared)
        self.shards = OptimizerShards(shared, self._transport)
        # Parameters of one process are reduced as well, which does nothing: every stage then has its key.
        self._entries.clear()
        for key, parameters in by_key.items():
            of_key = members.get(key, (self._transport.process,))
            self.add(key, parameters, of_key, self.shards.owner if self.scattered else None)

    @property
    def members_with_all(self) -> tuple[int, ...]:
        """The processes that have all sums of gradients between them: a pipeline's, or all where these are divided."""
        topology = self._transport.topology
        if self.sharded is not None or (self.scattered and self._entries):
            return topology.everyone
        return tuple(sorted(topology.pipeline_processes(self._transport.replica)))

    def counts(self, parameter: Parameter, first: bool) -> bool:
        """Whether this process is the one of `members_with_all` that counts a parameter in sums over the model.

        Args:
            parameter: one that this rank holds.
            first: whether this rank is the first of the pipeline's ranks that hold it.
        """
        if self.sharded is not None:
            places = {DATA: self._transport.replica, TENSOR: self._transport.topology.tensor_rank}
            return first and not any(places[each] for each in places.keys() - dimensions(parameter))
        return self.shards.mine(parameter) if self.scattered and self._entries else first

    def stage_done(self, stage: int) -> None:
        """The gradients of a stage are complete here. Stages of later passes, which are done before, have none."""
        if self.sharded is not None:
            self.sharded.stage_done(stage)
        if self.overlapped and (_STAGE, stage) in self._entries:
            self.start((_STAGE, stage))

    def add(self, key: Key, parameters: Iterable[Parameter], members: tuple[int, ...], owner: Owner = None) -> None:
        """Name what is to be reduced.

        Args:
            key: the same on all members, such as ``("stage", 3)``; all keys must compare with each other. The largest
                comes first, so that last stages do, whose backward passes end first.
            parameters: the same ones in the same order on all members.
            members: the processes that hold them, sorted. Their group must have been made.
            owner: the member that gets the sum of a parameter, the same on all members; ``None``: all of them get it.
        """
        own = list(parameters)
        self._entries[key] = _Entry(own, members, None if owner is None else {id(each): owner(each) for each in own})

    def start(self, key: Key) -> None:
        """Reduce the gradients of a key in the background, as soon as its turn in the group has come."""
        entry = self._entries[key]
        entry.wanted = True
        self._issue(entry.members)

    def await_further(self) -> None:
        """Leave the gradients of a batch to a later `finish`, also of parameters that are frozen until then."""
        for entry in self._entries.values():
            entry.note_trainable()

    def finish(self) -> None:
        """Reduce what was not started yet, wait for all, and leave the sums in ``p.grad``.

        Collective: every member takes part with all its keys, whether they have gradients on it or not.
        """
        for entry in self._entries.values():
            entry.wanted = True
        for members in {entry.members: None for entry in self._entries.values()}:
            self._issue(members)
        for key in sorted(self._entries, reverse=True):
            self._finish(key, self._entries[key])

    def _issue(self, members: tuple[int, ...]) -> None:
        """Start the wanted keys of a group in their order, up to the first that is not wanted yet."""
        if len(members) == 1:
            return
        # A collective matches its counterpart by order alone: one that began out of turn would sum different tensors.
        for key in sorted((key for key, entry in self._entries.items() if entry.members == members), reverse=True):
            entry = self._entries[key]
            if not entry.wanted:
                return
            if entry.presence is None:
                self._begin(entry)

    @torch.no_grad()
    def _begin(self, entry: _Entry) -> None:
        entry.note_trainable()
        present = torch.tensor([parameter.grad is not None for parameter in entry.trainable], dtype=torch.int32)
        # On the host, so that reading it does not wait for the device.
        entry.presence = (present, self._transport.all_reduce(present, entry.members))
        # Buckets hold all trainable parameters, not only those with gradients: their sizes agree without a message.
        for indices in buckets(entry.trainable, self._bucket_bytes):
            entry.buckets.append(self._reduced(entry, indices) if entry.owners is None else self._kept(entry, indices))

    def _reduced(self, entry: _Entry, indices: list[int]) -> _Bucket:
        """Start to sum gradients for all members."""
        flat = self._fill([entry.trainable[index] for index in indices])
        return _Bucket(flat, indices, self._transport.all_reduce(flat, entry.members))

    def _kept(self, entry: _Entry, indices: list[int]) -> _Bucket:
        """Start to sum gradients for the owners; the bucket has what this process gets of them."""
        assert entry.owners is not None
        of_member: dict[int, list[int]] = {member: [] for member in entry.members}
        for index in indices:
            of_member[entry.owners[id(entry.trainable[index])]].append(index)
        like = entry.trainable[indices[0]]
        # No reference to the parts of others is kept: their memory is free when the transport has done with them.
        parts = [self._fill([entry.trainable[index] for index in part], like) for part in of_member.values()]
        work, mine = self._transport.reduce_scatter(parts, entry.members), self._transport.process
        return _Bucket(parts[entry.members.index(mine)], of_member[mine], work)

    def _fill(self, parameters: Sequence[Parameter], like: Parameter | None = None) -> Tensor:
        """The gradients in one buffer; the parameters let go of theirs. ``like`` says the type where there are none."""
        first = parameters[0] if like is None else like
        parts = [local(parameter) for parameter in parameters]
        narrow = self.dtype is not None and first.is_floating_point() and first.itemsize > self.dtype.itemsize
        dtype = self.dtype if narrow else first.dtype
        flat = torch.zeros(sum(part.numel() for part in parts), dtype=dtype, device=first.device)
        for parameter, view in zip(parameters, _views(flat, parts), strict=True):
            if parameter.grad is None:
                continue
            if parameter.grad.layout is not torch.strided:
                raise ConfigurationError(
                    f"A parameter of shape {tuple(parameter.shape)} that several processes hold has a gradient with "
                    f"layout {parameter.grad.layout}; only dense gradients can be summed.",
                    hint="Make the embedding with sparse=False.",
                )
            view.copy_(local(settled(parameter.grad, parameter)))
            # The gradient now exists in the bucket alone.
            parameter.grad = None
        return flat

    @torch.no_grad()
    def _finish(self, key: Key, entry: _Entry) -> None:
        if entry.presence is not None:
            present, work = entry.presence
            work.wait()
            flags = present.tolist()
            for parameter in entry.trainable:
                if parameter.grad is not None:
                    raise ConfigurationError(
                        f"A parameter of {key!r} of shape {tuple(parameter.shape)} got a gradient after its "
                        "reduction had started; it would be lost.",
                        hint="Start the reduction after the last backward pass that reaches the parameter.",
                    )
            for bucket in entry.buckets:
                bucket.work.wait()
                parameters = [entry.trainable[index] for index in bucket.indices]
                views = _views(bucket.flat, [local(parameter) for parameter in parameters])
                for index, parameter, view in zip(bucket.indices, parameters, views, strict=True):
                    same = view.dtype == parameter.dtype
                    summed = view if same or not flags[index] else torch.empty_like(local(parameter)).copy_(view)
                    parameter.grad = with_local(summed, parameter) if flags[index] else None
        entry.wanted, entry.presence, entry.trainable, entry.buckets = False, None, [], []


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
    """Each parameter's part of the buffer, in the parameter's shape and memory format."""
    offset = 0
    for parameter in parameters:
        part = flat[offset : offset + parameter.numel()]
        offset += parameter.numel()
        # Optimizers are fast only where gradient and parameter have the same strides.
        dense = TensorSpec.of(parameter).dense
        yield part.as_strided(parameter.shape, parameter.stride()) if dense else part.view(parameter.shape)
