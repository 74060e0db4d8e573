"""What one process issues to NCCL and Gloo, in its order, as `recording` notes it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple


class Group(NamedTuple):
    """A process group: the number of the call that made it, its processes, and its backend."""

    number: int
    members: tuple[int, ...]
    backend: str


class Made(NamedTuple):
    """The process calls ``new_group``, as all processes do."""

    group: Group


class Issued(NamedTuple):
    """The process starts an operation of a group.

    Args:
        number: of the operation, on this process.
        group: the group.
        verb: "send", "receive" or the name of a collective.
        size: bytes, equal at both ends of a message and on all members of a collective.
        peer: the other process of a message; ``None`` for a collective.
        tag: messages of Gloo with different tags may overtake each other; NCCL ignores tags.
        content: what a message between stages carries, equal at both ends: the stages and the micro-batch.
    """

    number: int
    group: Group
    verb: str
    size: int
    peer: int | None = None
    tag: int = 0
    content: Hashable = None


class Waited(NamedTuple):
    """The process waits for an operation: its stream does on NCCL, the process itself on Gloo."""

    number: int


class Computed(NamedTuple):
    """The process launches the kernels of an action."""

    action: str


class Read(NamedTuple):
    """The process waits until its kernels are done: it reads a tensor."""


Event = Made | Issued | Waited | Computed | Read
