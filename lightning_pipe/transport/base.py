"""The interface under the executor: messages between ranks, reductions over groups, objects on the slow path."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_pipe.errors import CommunicationError
from lightning_pipe.tensor_spec import numbered
from lightning_pipe.transport.objects import FIRST, decode, encode, text_size
from lightning_pipe.transport.topology import Topology

if TYPE_CHECKING:
    from lightning_pipe.transport.failures.board import FailureBoard
    from lightning_pipe.transport.message_layout import MessageLayout

Direction = Literal["forward", "backward"]
Reduction = Literal["sum", "max", "min"]
Words = list[int]
OBJECT_TAGS = 1 << 29
COLLECTIVE_TAG = OBJECT_TAGS - 1
"""The tag of objects in collectives: members come to those that they share in the same order."""


class Lane(NamedTuple):
    """A channel between two ranks. Messages in one lane arrive in the order in which they were sent.

    Lanes do not wait for each other: a receive that is still pending in one never holds up a send in another.
    """

    direction: Direction
    pipe: int = 0

    def __str__(self) -> str:
        return f"the {self.direction} lane of pipe {self.pipe}"


class Channel(NamedTuple):
    """A lane from one pipeline rank to another: what `Transport.connect` prepares."""

    rank: int
    peer: int
    lane: Lane


class Work(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when the operation is done. On a GPU the current stream waits, not the host.

        Raises:
            CommunicationError: a peer failed, left, or did not answer in time.
        """


class Parts(NamedTuple):
    """A receive of control words and tensors under way, and the function that reads the message once it has come."""

    work: Work
    read: Callable[[], tuple[list[int], list[Tensor]]]

    def wait(self) -> tuple[list[int], list[Tensor]]:
        """Wait for the message; returns its control words and tensors."""
        self.work.wait()
        return self.read()


class Several:
    """Several operations that count as one."""

    def __init__(self, *works: Work) -> None:
        self._works = works

    def wait(self) -> None:
        """Return when all are done."""
        for work in self._works:
            work.wait()


DONE = Several()
"""An operation that had nothing to do."""


class Transport(ABC):
    """Moves messages between the ranks of a pipeline and reduces over groups of processes; one per process.

    ``peer`` is always a pipeline rank of the same replica; ``members`` and ``source`` are processes of the world.

    Args:
        topology: the place of every process.
        process: this process.
        device: where messages live.
        timeout: the longest that a blocking call waits.

    Attributes:
        rank: this process's rank in its pipeline.
        replica: the pipeline that this process belongs to.
        peers: the process of each rank of this pipeline.
        names: how messages name each rank of this pipeline.
        board: where failures are looked up and reported; set by `FailureBoard`.
        waiting: what the process is blocked on, for reports; ``None`` while it is not.
        inline_control: whether control words travel in messages: the host waits for a GPU to read what is there.
    """

    shares_generators = False
    """Whether other ranks are threads of this process, and draw from the same random generators."""

    def __init__(self, topology: Topology, process: int, device: torch.device, timeout: timedelta) -> None:
        self.topology = topology
        self.process = process
        self.replica, self.rank = topology.locate(process)
        self.device = numbered(device)
        self.timeout = timeout
        self.peers = topology.pipeline_processes(self.replica)
        self.names = tuple(topology.describe(peer) for peer in self.peers)
        self.board: FailureBoard | None = None
        self.waiting: object | None = None
        self.inline_control = device.type == "cpu"

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
        return (self.send(layout.pack(control if self.inline_control else (), tensors, self.device), peer, lane),)

    def receive_parts(self, layout: MessageLayout, peer: int, lane: Lane, control: Callable[[], Words]) -> Parts:
        """Start to receive what `send_parts` sends; ``control`` gets the words that stay behind."""
        data = torch.empty(layout.size, dtype=torch.uint8, device=self.device)
        work = self.receive(data, peer, lane)
        return Parts(work, lambda: layout.unpack(data) if self.inline_control else (control(), layout.tensors(data)))

    def send_object(self, obj: object, peer: int, tag: int) -> Work:
        """Start to send any object that pickles; it may be changed at once. The caller keeps what it gets; see `send`.

        Objects with different tags may overtake each other. Tensors of an accelerator arrive on the peer's device.
        """
        return self.send_object_to(obj, [peer], tag)

    def send_object_to(self, obj: object, peers: Sequence[int], tag: int) -> Work:
        """Start to send an object to several ranks of this pipeline; see `send_object`."""
        return self._send_object(obj, [self.peers[peer] for peer in peers], tag)

    def receive_object(self, peer: int, tag: int) -> Any:
        """The next object that ``peer`` sends with this tag."""
        return self._receive_object(self.peers[peer], tag)

    def _send_object(self, obj: object, processes: Sequence[int], tag: int, *, kept: bool = False) -> Work:
        """Start to send an object to processes of the world; ``kept``: it stays as it is until the sends are done."""
        if not processes:  # to encode what is on an accelerator, the host would wait for it
            return Several()
        text, large = encode(obj, by_reference=kept or all(map(self._copies, processes)))
        works: list[Work] = []
        for process in processes:
            works += [self._send_bytes(part, process, tag) for part in (text[:FIRST], text[FIRST:]) if part.numel()]
            works += [self._send_bytes(memory, process, tag) for memory in large]
        return Several(*works)

    def _receive_object(self, process: int, tag: int) -> Any:
        text = self._receive_text(process, tag)
        return decode(text, lambda memory: self._receive_bytes(memory, process, tag).wait(), self.device)

    @abstractmethod
    def make_groups(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Prepare groups of processes for collectives.

        Collective over the world, with the same list everywhere, and idempotent. The group of all processes and
        groups of one process need no preparation.
        """

    def open_groups(self, groups: Iterable[tuple[int, ...]]) -> None:  # noqa: B027 - most transports need no preparation
        """Prepare groups that were made for collectives that begin while messages are under way.

        Collective over the members of each group, and idempotent. Only NCCL needs it: the first collective of a group
        holds the host until all members come to it, and they may wait for messages that this host has yet to send.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, members: tuple[int, ...], op: Reduction = "sum") -> Work:
        """Start to reduce a contiguous tensor in place over the members (sorted processes)."""

    @abstractmethod
    def reduce_scatter(self, parts: Sequence[Tensor], members: tuple[int, ...]) -> Work:
        """Start to sum contiguous tensors over the members, each for one of them.

        Afterwards ``parts[i]`` is the sum on ``members[i]``. On other members its values are of no use, and its memory
        is free, but for the caller's own references, when the operation has been waited for.

        Args:
            parts: one for each member, of any sizes and types that are the same on all members; some may be empty.
            members: the sorted processes.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int, members: tuple[int, ...]) -> Work:
        """Start to copy the source's contiguous tensor into those of the other members."""

    def broadcast_object(self, obj: Any, source: int, members: tuple[int, ...]) -> Any:
        """The source's own object there, a copy on every other member, which passes anything."""
        if self.process != source:
            return self._receive_object(source, COLLECTIVE_TAG)
        others = [member for member in members if member != source]
        self._send_object(obj, others, COLLECTIVE_TAG, kept=True).wait()
        return obj

    def all_gather_object(self, obj: object, members: tuple[int, ...]) -> list[Any]:
        """Every member's object, in the order of the members; the first of them collects."""
        first, *others = members
        if self.process != first:
            self._send_object(obj, [first], COLLECTIVE_TAG, kept=True).wait()
            return self._receive_object(first, COLLECTIVE_TAG)  # type: ignore[no-any-return]
        gathered = [obj, *(self._receive_object(other, COLLECTIVE_TAG) for other in others)]
        self._send_object(gathered, others, COLLECTIVE_TAG, kept=True).wait()
        return gathered

    def _receive_text(self, process: int, tag: int) -> bytes:
        """The text of an object; see `lightning_pipe.transport.objects`."""
        text, size = b"", FIRST
        while len(text) < size:
            part = torch.empty(size - len(text), dtype=torch.uint8, device="cpu")
            self._receive_bytes(part, process, tag).wait()
            text += part.numpy().tobytes()
            size = text_size(text)
        return text

    def _copies(self, process: int) -> bool:
        """Whether bytes for a process have been copied when `_send_bytes` returns."""
        return False

    def sum_over_replicas(self, amount: float) -> float:
        """The sum of the amounts of all pipelines, from the processes with the same rank in each."""
        members = tuple(sorted(self.topology.replica_processes(self.rank)))
        if len(members) == 1:
            return amount
        total = torch.tensor([amount], dtype=torch.float64)
        self.all_reduce(total, members).wait()
        return float(total)

    @abstractmethod
    def _send_bytes(self, data: Tensor, process: int, tag: int) -> Work:
        """Start to send flat bytes in host memory, beside the lanes; those with one tag keep their order."""

    @abstractmethod
    def _receive_bytes(self, data: Tensor, process: int, tag: int) -> Work:
        """Start to receive what `_send_bytes` sends."""

    @abstractmethod
    def barrier(self, members: tuple[int, ...] | None = None) -> None:
        """Return when every member (``None``: every process) has called this."""

    def abort(self) -> None:
        """Give up: pending operations fail here and, as soon as possible, at the peers."""
        self.close()

    @contextmanager
    def guarding(self, operation: object) -> Iterator[None]:
        """Surround a collective of another library: reports of a hang name it, and its errors say who failed first.

        Args:
            operation: what the collective does, in words that follow "could not".
        """
        yield

    @abstractmethod
    def close(self) -> None:
        """Release what the transport holds. Pending operations must be done; idempotent."""

    def describe(self, process: int | None = None) -> str:
        """How messages name a process (``None``: this one)."""
        return self.topology.describe(self.process if process is None else process)

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


class Message(NamedTuple):
    """A message under way, as errors and reports name it."""

    verb: Literal["send", "receive"]
    size: int
    peer: str
    lane: Lane | str

    def __str__(self) -> str:
        preposition = "to" if self.verb == "send" else "from"
        return f"{self.verb} {self.size} bytes {preposition} {self.peer} on {self.lane}"


class Collective(NamedTuple):
    """A collective under way, as errors and reports name it."""

    name: str
    size: int
    members: tuple[int, ...]

    def __str__(self) -> str:
        size = f" of {self.size} bytes" if self.size else ""
        return f"finish {self.name}{size} with ranks {list(self.members)}"
