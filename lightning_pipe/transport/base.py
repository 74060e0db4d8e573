"""What the executor moves data with: messages between ranks, reductions over groups, objects on the slow path."""

from __future__ import annotations

import ctypes
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from lightning_pipe.errors import CommunicationError
from lightning_pipe.tensor_spec import numbered
from lightning_pipe.transport.objects import decode, encode
from lightning_pipe.transport.topology import Topology
from lightning_pipe.transport.work import DONE, GroupWork, Guarded, Several, Work

if TYPE_CHECKING:
    from lightning_pipe.transport.failures import FailureBoard
    from lightning_pipe.transport.message_layout import MessageLayout
    from lightning_pipe.transport.shared_memory.peer import SharedMemoryPeer

Direction = Literal["forward", "backward"]
Reduction = Literal["sum", "max", "min"]
Words = list[int]
Arriving = Callable[[], tuple[Words, list[Tensor]]]
"""Waits for a message under way; returns its control words and tensors."""
OBJECT_TAGS = 1 << 29
COLLECTIVE_TAG = OBJECT_TAGS - 1
"""The tag of objects in collectives: members come to those that they share in the same order."""
ABORT_TAG = (1 << 16) - 1
"""The tag of a message that nobody sends."""
FIRST_OBJECT_TAG = ABORT_TAG + 1
"""Tags of torch below are those of lanes, from here on those of objects."""
_OPS = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}


class Lane(NamedTuple):
    """A channel between two ranks. Messages in one lane arrive in the order in which they were sent.

    Lanes do not wait for each other: a receive that is still pending in one never holds up a send in another.
    """

    direction: Direction
    pipe: int = 0

    def __str__(self) -> str:
        return f"the {self.direction} lane of pipe {self.pipe}"

    @property
    def tag(self) -> int:
        """Tells its messages from those of other lanes."""
        return 2 * self.pipe + (self.direction == "backward")


class Channel(NamedTuple):
    """A lane from one pipeline rank to another: what `Transport.connect` prepares."""

    rank: int
    peer: int
    lane: Lane


class Transport(ABC):
    """Moves messages between the ranks of a pipeline and reduces over groups of processes; one per process.

    ``peer`` is always a pipeline rank of the same replica; ``members`` and ``source`` are processes of the world.

    Collectives go over torch's process groups. A transport makes groups of its own, so that no collective of the user
    or of Lightning in the default group can come between; in a group of one process they are done at once. Objects
    take the way of messages between hosts: Gloo, and shared memory within one.

    Args:
        topology: the place of every process.
        process: this process.
        device: where messages live.
        timeout: the longest that a blocking call waits.
        backend: the backend of torch's groups for tensors.

    Attributes:
        rank: this process's rank in its pipeline.
        replica: the pipeline that this process belongs to.
        peers: the process of each rank of this pipeline.
        board: where failures are looked up and reported; set by `FailureBoard`.
        waiting: what the process is blocked on, for reports; ``None`` while it is not.
        inline_control: whether control words travel in messages: the host waits for a GPU to read what is there.
    """

    shares_generators = False
    """Whether other ranks are threads of this process, and draw from the same random generators."""

    def __init__(
        self, topology: Topology, process: int, device: torch.device, timeout: timedelta, backend: str = "gloo"
    ) -> None:
        self.topology = topology
        self.process = process
        self.replica, self.rank = topology.locate(process)
        self.device = numbered(device)
        self.timeout = timeout
        self.peers = topology.pipeline_processes(self.replica)
        self.board: FailureBoard | None = None
        self.waiting: object | None = None
        self.inline_control = device.type == "cpu"
        self._backend = backend
        # by members and backend; ``None`` where this process is no member
        self._groups: dict[tuple[tuple[int, ...], str], ProcessGroup | None] = {}
        self._mesh_groups: dict[tuple[tuple[int, ...], ...], ProcessGroup] = {}  # by the lines of all processes
        self._local: dict[int, SharedMemoryPeer] = {}

    def _open(self) -> None:
        """Make the groups that every run needs. Collective over the world."""
        topology = self.topology
        self._make_group(topology.everyone)
        self.make_groups([topology.same_tensor_rank])
        self.make_groups([tuple(sorted(topology.pipeline_processes(n))) for n in range(topology.replicas)])
        for first in range(0, topology.world_size, topology.tensor):
            self._make_group(topology.tensor_processes(first))

    def connect(self, channels: Iterable[Channel]) -> None:  # noqa: B027 - most transports need no preparation
        """Prepare the channels that a schedule uses.

        Collective over the world, with the same channels everywhere, and idempotent. Only NCCL needs it: it opens
        one communicator per channel, which must happen in the same order at both ends.
        """

    @abstractmethod
    def send(self, data: Tensor, peer: int, lane: Lane) -> Work:
        """Start to send a flat, contiguous ``uint8`` tensor. It must not be changed before the operation is done.

        The caller keeps what it gets until it has waited for it, as with everything that is started here: Gloo loses a
        message whose operation nobody keeps if its receiver comes later, and all that follow it to this peer.
        """

    @abstractmethod
    def receive(self, data: Tensor, peer: int, lane: Lane) -> Work:
        """Start to receive into a flat, contiguous ``uint8`` tensor that has exactly the message's size.

        Both ends must agree on it: Gloo takes a shorter message without an error and ends the process on a longer one.
        """

    def send_parts(
        self, layout: MessageLayout, control: Words, tensors: Sequence[Tensor | None], peer: int, lane: Lane
    ) -> Sequence[Work]:
        """Start to send control words and tensors, which may be changed at once, as one message.

        Args:
            layout: where the words and the tensors lie in the message.
            control: the control words; they stay behind without `inline_control`.
            tensors: the tensors, with ``None`` for missing ones.
            peer: the receiver.
            lane: the lane.
        """
        process = self.peers[peer]
        if process in self._local and self.inline_control:  # written where the process of this host reads it
            write = partial(layout.write, control=control, tensors=tensors)
            self._hand_over(process, layout.size, write, lane, lane.tag)
            return ()
        return (self.send(layout.pack(control if self.inline_control else (), tensors, self.device), peer, lane),)

    def receive_parts(self, layout: MessageLayout, peer: int, lane: Lane, control: Callable[[], Words]) -> Arriving:
        """Start to receive what `send_parts` sends; ``control`` gets the words that stay behind."""
        local = self._local.get(process := self.peers[peer])
        if local is not None and self.inline_control:
            operation = f"receive {layout.size} bytes from {self.describe(process)} on {lane}"
            return GroupWork(self, operation, local.post(layout.size, layout.read, lane.tag), None).wait
        data = torch.empty(layout.size, dtype=torch.uint8, device=self.device)
        work = self.receive(data, peer, lane)

        def arrived() -> tuple[Words, list[Tensor]]:
            work.wait()
            return layout.read(data.data_ptr()) if self.inline_control else (control(), layout.tensors(data))

        return arrived

    def send_object(self, obj: object, peer: int, tag: int) -> Work:
        """Start to send any object that pickles; it may be changed at once. The caller keeps what it gets; see `send`.

        Objects with different tags may overtake each other. Tensors of an accelerator arrive on the peer's device.
        """
        return self.send_object_to([self.peers[peer]], obj, tag)

    def receive_object(self, peer: int, tag: int) -> Any:
        """The next object that ``peer`` sends with this tag."""
        return self.receive_object_from(self.peers[peer], tag)

    def send_object_to(self, processes: Sequence[int], obj: object, tag: int, *, kept: bool = False) -> Work:
        """Start to send an object to processes of the world; ``kept``: it stays as it is until the sends are done."""
        if not processes:  # to encode what is on an accelerator, the host would wait for it
            return Several()
        # what goes through shared memory has been copied when the send returns
        messages = encode(obj, by_reference=kept or self._local.keys() >= {*processes})
        start = partial(self._start_send, lane=f"the object lane with tag {tag}", tag=FIRST_OBJECT_TAG + tag)
        return Several(*[start(message, process) for process in processes for message in messages])

    def receive_object_from(self, process: int, tag: int) -> Any:
        """The next object that a process of the world sends with this tag."""
        lane, number = f"the object lane with tag {tag}", FIRST_OBJECT_TAG + tag
        return decode(lambda message: self._start_receive(message, process, lane, number).wait(), self.device)

    def make_groups(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Prepare groups of processes for collectives.

        Collective over the world, with the same list everywhere, and idempotent. The group of all processes and
        groups of one process need no preparation.
        """
        for group in groups:
            for number in range(self.topology.tensor):  # the other tensor ranks ask for theirs at the same time
                self._make_group(tuple(member - self.topology.tensor_rank + number for member in group))

    def _make_group(self, members: tuple[int, ...]) -> None:
        for backend in dict.fromkeys(("gloo", self._backend)):
            if len(members) > 1 and (members, backend) not in self._groups:
                group = self.new_group(members, backend)
                self._groups[members, backend] = group if self.process in members else None

    def mesh_group(self, lines: Sequence[Sequence[int]]) -> ProcessGroup:
        """A group for collectives of torch's own along a dimension of a mesh of devices. Collective over the world.

        Args:
            lines: the processes that differ in this dimension alone; this process is in one of them.
        """
        key = tuple(map(tuple, lines))
        if key not in self._mesh_groups:
            made = {line: self.new_group(line, self._backend) for line in key}
            self._mesh_groups[key] = next(group for line, group in made.items() if self.process in line)
        return self._mesh_groups[key]

    def new_group(self, processes: Sequence[int], backend: str = "gloo") -> ProcessGroup:
        """A process group of its own, with this transport's timeout. Collective over the world."""
        with self.guarding(f"make a group of processes {list(processes)}"):
            # Without a timeout torch would take its default of half an hour, not that of the default group.
            group: ProcessGroup = dist.new_group(sorted(processes), timeout=self.timeout, backend=backend)
        return group

    def _group(self, members: tuple[int, ...], *, host: bool) -> ProcessGroup | None:
        """The group of these members; ``None`` if there is nobody else in it."""
        return None if len(members) == 1 else self._groups[members, "gloo" if host else self._backend]

    def open_groups(self, groups: Iterable[tuple[int, ...]]) -> None:  # noqa: B027 - most transports need no preparation
        """Prepare groups that were made for collectives that begin while messages are under way.

        Collective over the members of each group, and idempotent. Only NCCL needs it: the first collective of a group
        holds the host until all members come to it, and they may wait for messages that this host has yet to send.
        """

    def all_reduce(self, tensor: Tensor, members: tuple[int, ...], op: Reduction = "sum") -> Work:
        """Start to reduce a contiguous tensor in place over the members (sorted processes)."""
        return self._collective("all-reduce", tensor, members, partial(dist.all_reduce, op=_OPS[op]))

    def reduce_scatter(self, parts: Sequence[Tensor], members: tuple[int, ...]) -> Work:
        """Start to sum contiguous tensors over the members, each for one of them.

        Afterwards ``parts[i]`` is the sum on ``members[i]``. On other members its values are of no use, and its memory
        is free, but for the caller's own references, when the operation has been waited for.

        Args:
            parts: one for each member, of any sizes and types that are the same on all members; some may be empty.
            members: the sorted processes.
        """
        # torch's reduce_scatter does the same over NCCL where parts have different sizes, and sums all of it everywhere
        # over Gloo (torch 2.13)
        return Several(
            *(
                self._collective("reduce", part, members, partial(dist.reduce, dst=member))
                for part, member in zip(parts, members, strict=True)
                if part.numel()
            )
        )

    def broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Work:
        """Start to copy the source's contiguous tensor into those of the other members."""
        return self._collective("broadcast", tensor, members, partial(dist.broadcast, src=source))

    def _collective(self, name: str, tensor: Tensor, members: tuple[int, ...], start: Callable[..., Any]) -> Work:
        group = self._group(members, host=tensor.device.type == "cpu")
        if group is None:
            return DONE
        operation = f"finish {name} of {tensor.nbytes} bytes with ranks {list(members)}"
        with self.guarding(operation):
            work = start(tensor, group=group, async_op=True)
        return GroupWork(self, operation, work, tensor)

    def broadcast_object(self, obj: Any, source: int, members: tuple[int, ...]) -> Any:
        """The source's own object there, a copy on every other member, which passes anything."""
        if self.process != source:
            return self.receive_object_from(source, COLLECTIVE_TAG)
        self.send_object_to([each for each in members if each != source], obj, COLLECTIVE_TAG, kept=True).wait()
        return obj

    def all_gather_object(self, obj: object, members: tuple[int, ...]) -> list[Any]:
        """Every member's object, in the order of the members; the first of them collects."""
        first, *others = members
        if self.process != first:
            self.send_object_to([first], obj, COLLECTIVE_TAG, kept=True).wait()
            return self.receive_object_from(first, COLLECTIVE_TAG)  # type: ignore[no-any-return]
        gathered = [obj, *(self.receive_object_from(other, COLLECTIVE_TAG) for other in others)]
        self.send_object_to(others, gathered, COLLECTIVE_TAG, kept=True).wait()
        return gathered

    def sum_over_replicas(self, *amounts: float) -> list[float]:
        """The sums of amounts of all pipelines, from the processes with the same rank in each."""
        total = torch.tensor(amounts, dtype=torch.float64, device="cpu")
        if self.topology.replicas > 1:
            self.all_reduce(total, self.topology.replica_processes(self.rank)).wait()
        return total.tolist()

    def _start_send(self, data: Tensor, process: int, lane: Lane | str, tag: int) -> Work:
        size = data.numel()
        if process in self._local:
            self._hand_over(process, size, lambda address: ctypes.memmove(address, data.data_ptr(), size), lane, tag)
            return DONE
        with self.guarding(operation := f"send {size} bytes to {self.describe(process)} on {lane}"):
            # What torch's isend calls, without its checks: they are half of the cost of a small message.
            work = self._messages.send([data], process, tag)
        return GroupWork(self, operation, work, data)

    def _start_receive(self, data: Tensor, process: int, lane: Lane | str, tag: int) -> Work:
        local, size = self._local.get(process), data.numel()
        with self.guarding(operation := f"receive {size} bytes from {self.describe(process)} on {lane}"):
            if local is not None:
                work: Any = local.post(size, lambda address: ctypes.memmove(data.data_ptr(), address, size), tag)
            else:
                work = self._messages.recv([data], process, tag)
        return GroupWork(self, operation, work, data)

    def _hand_over(self, process: int, size: int, write: Callable[[int], Any], lane: Lane | str, tag: int) -> None:
        """Send a message through shared memory; ``write`` writes it to an address."""
        try:  # a context costs as much as the copy of a small message
            self._local[process].hand_over(size, write, tag)
        except OSError as error:
            raise self.error(f"send {size} bytes to {self.describe(process)} on {lane}", error) from error

    @property
    def _messages(self) -> ProcessGroup:
        # each group of Gloo has a thread that wakes a hundred times a second: messages share that of collectives
        group = self._groups[self.topology.everyone, "gloo"]
        assert group is not None
        return group

    def barrier(self) -> None:
        """Return when every process has called this."""
        self.all_reduce(torch.zeros(1), self.topology.everyone).wait()

    def abort(self) -> None:
        """Give up: pending operations fail here and, as soon as possible, at the peers."""
        for peer in self._local.values():
            peer.shutdown()
        groups = [group for (_, backend), group in self._groups.items() if backend == "gloo"]
        groups += self._mesh_groups.values() if self._backend == "gloo" else ()
        # Others may be on their way into a collective of the default group, where nobody will meet them any more.
        if groups and dist.is_initialized() and dist.get_backend() == "gloo":
            groups.append(dist.group.WORLD)
        for group in filter(None, groups):
            # Gloo's own abort leaves pending operations alone (torch 2.13); a wait that times out closes connections
            with suppress(RuntimeError):
                nobody = (group.rank() + 1) % group.size()
                group.recv([torch.empty(1, dtype=torch.uint8)], nobody, ABORT_TAG).wait(timedelta(milliseconds=1))

    def guarding(self, operation: object) -> Guarded:
        """A context around ``operation``, words that follow "could not"; for collectives of other libraries, too."""
        return Guarded(self, operation)

    def close(self) -> None:
        """Release what the transport holds. Pending operations must be done; idempotent."""
        for peer in self._local.values():
            peer.close()
        if dist.is_initialized():
            for group in filter(None, (*self._groups.values(), *self._mesh_groups.values())):
                dist.destroy_process_group(group)
        # a group that is referred to keeps its connections and the store
        for known in (self._local, self._groups, self._mesh_groups):
            known.clear()

    def describe(self, process: int | None = None) -> str:
        """How messages name a process (``None``: this one)."""
        return self.topology.names[self.process if process is None else process]

    def error(self, operation: object, cause: BaseException | None, timed_out: bool = False) -> CommunicationError:
        """The error for an operation that failed, with the first failure or the report of a hang, if known."""
        timed_out |= "timed out" in str(cause).lower() or (self.board is not None and self.board.overdue)
        what = f"{self.describe().capitalize()} could not {operation}"
        if timed_out:
            limit = self.timeout.total_seconds() if self.board is None else self.board.limit
            message = f"{what} within {limit:g} s."
        elif cause is None:  # the board knows it
            message = f"{what}."
        else:
            # Gloo puts the place in its own source before its words
            words = re.sub(r"^\[[^\]]*\] ?", "", str(cause).split("\n", 1)[0])
            message = f"{what}: {words or type(cause).__name__}"
        if self.board is not None:
            return self.board.explain(message, timed_out=timed_out)
        return CommunicationError(message, hint="Look for the first error of another rank, or raise the timeout.")
