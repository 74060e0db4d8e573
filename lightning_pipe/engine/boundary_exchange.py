"""Sends what crosses stage boundaries: everything the first time, afterwards only the tensors that are used.

One hop of a micro-batch from stage s to stage s + 1 and back::

    first time    FORWARD    path and all live tensors, one object  --->   learns path and sizes
                  BACKWARD   <---  which tensors were used | their gradients
    end of batch             both ends make the same `BoundaryPlan` of what was used
    from then on  FORWARD    _AGREED  | words | tensors that are used       --->   into a buffer that was posted before
                  or         _VALUES  | all live tensors, and then what the code has read between layers, one object
                  or         _CHANGED | nothing of use, and then everything as in the first time
                  BACKWARD   <---  as above

The transport draws how one of these messages travels: `lightning_pipe.transport.shared_memory`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import compress
from typing import NamedTuple

from torch import Tensor

from lightning_pipe.engine.kept_words import Hop
from lightning_pipe.errors import CommunicationError
from lightning_pipe.intercept.call_record import RunRecord, Value
from lightning_pipe.intercept.crossing import Crossing, Returned
from lightning_pipe.schedules import Action, Kind
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.transport.base import Arriving, Lane, Transport, Words
from lightning_pipe.transport.message_layout import MessageLayout
from lightning_pipe.transport.work import Work

_AGREED, _CHANGED, _VALUES = 0, 1, 2
_CONTROL = {"forward": 1, "backward": 2}
"""The channels of control words that have messages of their own; that of whole crossings is 0."""
_KINDS = 64
_STAGES = 1024
_AT_ONCE = 128
_lane = lru_cache(Lane)
_Data = list[Tensor | None]
_PlanKey = tuple[int, int, int, Hashable]
"""Pipe, stage, receiving stage and signature."""


class BoundaryKey(NamedTuple):
    """One micro-batch on its way from a stage to a later one, mostly the next, on its pipe."""

    pipe: int
    stage: int
    micro_batch: int
    to: int

    @classmethod
    def of(cls, message: Action) -> BoundaryKey:
        """The boundary that a message crosses; the next stage is at the other end if the message does not name it."""
        step = 1 if message.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD) else -1
        other = message.stage + step if message.other is None else message.other
        return cls(message.pipe, min(message.stage, other), message.micro_batch or 0, max(message.stage, other))

    def tag(self, channel: int) -> int:
        """That of its objects; those with the same tag keep their order, so that numbers may come again."""
        return ((self.micro_batch % _AT_ONCE * _STAGES + self.stage) * _STAGES + self.to) * 3 + channel


@dataclass(frozen=True)
class BoundaryPlan:
    """Which tensors travel over a boundary, and how their message and the one back are laid out.

    Both ends have agreed on it for the micro-batches of one signature, or it comes with a crossing that goes in full.

    Args:
        path: the calls and the live tensors of the sending stage.
        numbers: the tensors that travel, by number, in the order of the path's entries.
    """

    path: RunRecord
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, path: RunRecord, numbers: Container[int] | None = None) -> BoundaryPlan:
        """The plan that lets some of the live tensors travel; ``None``: all of them."""
        alive = [entry.number for entry in path.entries]
        return cls(path, tuple(number for number in alive if numbers is None or number in numbers))

    @cached_property
    def gradients(self) -> tuple[int, ...]:
        """The numbers of the tensors whose gradients come back."""
        return tuple(entry.number for entry in self.path.entries if entry.requires_grad and entry.number in self.all)

    @cached_property
    def all(self) -> frozenset[int]:
        """The numbers as a set."""
        return frozenset(self.numbers)

    def masks(self, used: Container[int], present: Container[int]) -> list[int]:
        """The masks of the backward message: which tensors were used, and which gradients are there."""
        return [*[n in used for n in self.numbers], *[n in present for n in self.gradients]]

    @cached_property
    def steady(self) -> bool:
        """Whether the path holds no values, which may lead to another one any time."""
        return not any(isinstance(leaf, Value) for call in self.path.calls for leaf in call.leaves)

    @cached_property
    def layout(self) -> MessageLayout:
        """The forward message: its kind, how many gradients were used, and a word for each call."""
        return MessageLayout(2 + len(self.path.calls), self._specs(self.numbers))

    @cached_property
    def gradient_layout(self) -> MessageLayout:
        """The backward message: the masks, then the gradients."""
        return MessageLayout(len(self.numbers) + len(self.gradients), self._specs(self.gradients))

    def _specs(self, numbers: Iterable[int]) -> tuple[TensorSpec, ...]:
        wanted = set(numbers)
        return tuple(entry.spec for entry in self.path.entries if entry.number in wanted)


@dataclass
class Transfer:
    """A crossing that has happened; both ends keep it until the gradients have come back.

    Args:
        plan: what travelled.
        works: the sends of this end, which are over when it is forgotten, or when its gradients have come.
        used: the numbers that the receiver or a later stage used, as gradients have told; ``None``: all.
    """

    plan: BoundaryPlan
    works: list[Work] = field(default_factory=list)
    used: frozenset[int] | None = None


@dataclass
class BoundaryExchange:
    """Sends and receives crossings and their gradients over a transport.

    Besides the tensors that were used, those with one element travel: a step may log them in some batches alone.

    A micro-batch goes by the plans that are there when it sets out. Plans are made of what is over (`end`): at the
    end of a batch, and where batches follow each other between two of them, at both ends. Before there is one, and
    whenever a step takes a path that the plan does not know, the crossing goes in full over the slow path.

    Args:
        transport: the rank's transport.
    """

    transport: Transport
    transfers: dict[BoundaryKey, Transfer] = field(default_factory=dict)
    _plans: dict[_PlanKey, BoundaryPlan] = field(default_factory=dict)
    # by micro-batch: the plans when it set out, and its signature
    _under_way: dict[int, tuple[dict[_PlanKey, BoundaryPlan], Hashable]] = field(default_factory=dict)
    _posted: dict[tuple[str, BoundaryKey], Arriving] = field(default_factory=dict)
    # by peer and pipe: the gradients sent there that it has not said to have used, and how many of its own are used
    _returned: defaultdict[tuple[int, int], deque[Sequence[Work]]] = field(default_factory=lambda: defaultdict(deque))
    _used: Counter[tuple[int, int]] = field(default_factory=Counter)
    # by kind of batch; and of the batch under way: else all words are said
    _kept: dict[Hashable, defaultdict[Hashable, Hop]] = field(default_factory=dict)
    _hops: defaultdict[Hashable, Hop] | None = None

    # ------------------------------------------------------------------ forward

    def set_out(self, micro_batch: int, signature: Hashable) -> None:
        """A micro-batch begins; those with the same signature have the same shapes. In one order on all ranks."""
        self._under_way[micro_batch] = self._plans, signature

    def send(self, key: BoundaryKey, peer: int, crossing: Crossing) -> None:
        """Start to send what leaves a stage."""
        plan, lane, works = self._plan(key), _lane("forward", key.pipe), list[Work]()
        if plan is not None:
            kind = _agreement(plan, crossing.path)
            agreed = kind != _CHANGED
            tensors = [crossing.tensors[n] if agreed else None for n in plan.numbers]
            words = [kind, self._used.pop((peer, key.pipe), 0)]
            words += crossing.words if agreed else [0] * len(plan.path.calls)
            works = self._send(lane, key, peer, plan.layout, words, tensors, agreed and plan.steady)
            if kind == _VALUES:
                works.append(self.transport.send_object(crossing.path.values, peer, key.tag(0)))
            if agreed:
                self.transfers[key] = Transfer(plan, works)
                return
        # The receiver knows neither sizes nor path yet: all of it goes as one object, by way of the host.
        whole = crossing.path, crossing.words, [tensor.detach().cpu() for tensor in crossing.tensors.values()]
        works.append(self.transport.send_object(whole, peer, key.tag(0)))
        self.transfers[key] = Transfer(BoundaryPlan.of(crossing.path), works)

    def expect(self, key: BoundaryKey, peer: int) -> None:
        """Post the buffer for what will come, as soon as its size is agreed."""
        if (plan := self._plan(key)) is not None:
            self._post(_lane("forward", key.pipe), key, peer, plan.layout)

    def receive(self, key: BoundaryKey, peer: int) -> Crossing:
        """Wait for what an earlier stage sent."""
        arriving, plan = self._posted.pop(("forward", key), None), self._plan(key)
        if arriving is not None and plan is not None:
            (word, used, *words), tensors = arriving()
            gradients = self._returned[peer, key.pipe]
            _end(works for _ in range(min(used, len(gradients))) for works in gradients.popleft())
            if word != _CHANGED:
                path = plan.path
                if word == _VALUES:
                    path = path.with_values(self.transport.receive_object(peer, key.tag(0)))
                return self._arrived(key, plan, path, tensors, words)
        path, words, values = self.transport.receive_object(peer, key.tag(0))
        tensors = [value.to(self.transport.device) for value in values]
        return self._arrived(key, BoundaryPlan.of(path), path, tensors, words)

    def _arrived(
        self, key: BoundaryKey, plan: BoundaryPlan, path: RunRecord, tensors: list[Tensor], words: Sequence[int]
    ) -> Crossing:
        self.transfers[key] = Transfer(plan)
        arrived = zip(plan.numbers, plan.layout.specs, tensors, strict=True)
        return Crossing(path, {number: spec.lay_out(tensor) for number, spec, tensor in arrived}, tuple(words))

    # ------------------------------------------------------------------ backward

    def send_gradients(self, key: BoundaryKey, peer: int, returned: Returned) -> None:
        """Start to send back the gradients of what was received."""
        transfer, (gradients, used) = self.transfers[key], returned
        plan = transfer.plan
        if not plan.gradients:  # the other end is told nothing
            return
        transfer.used, tensors = used, [gradients.get(number) for number in plan.gradients]
        masks, lane = plan.masks(used, gradients), _lane("backward", key.pipe)
        works = self._send(lane, key, peer, plan.gradient_layout, masks, tensors, plan.steady)
        self._returned[peer, key.pipe].append(works)
        transfer.works += works

    def expect_gradients(self, key: BoundaryKey, peer: int) -> None:
        """Post the buffer for the gradients of what was sent."""
        if (plan := self.transfers[key].plan).gradients:
            self._post(_lane("backward", key.pipe), key, peer, plan.gradient_layout)

    def receive_gradients(self, key: BoundaryKey, peer: int) -> Returned:
        """Wait for the gradients, by number, and the numbers that later stages used."""
        plan = (transfer := self.transfers[key]).plan
        if not plan.gradients:
            return Returned({}, plan.all)
        masks, tensors = self._posted.pop(("backward", key))()
        self._used[peer, key.pipe] += 1
        _end(transfer.works)
        transfer.used = frozenset(compress(plan.numbers, masks))
        arrived = compress(zip(plan.gradients, tensors, strict=True), masks[len(plan.numbers) :])
        return Returned(dict(arrived), transfer.used)

    # ------------------------------------------------------------------ bookkeeping

    def begin_batch(self, kind: Hashable) -> None:
        """Begin a batch that ends with `end`; words that hold the host go unsaid as in batches of its kind."""
        if not self.transport.inline_control:
            if len(self._kept) > _KINDS:  # at both ends: they have had the same batches
                self._kept.clear()
            self._hops = self._kept.setdefault(kind, defaultdict(Hop))

    def end(self, micro_batches: Iterable[int] | None = None) -> None:
        """End the way of micro-batches: wait for their sends, and make plans of what has crossed.

        Both ends of a boundary make the same plans of the same transfers, before the same micro-batch sets out.

        Args:
            micro_batches: whose transfers, the same at both ends, of which the receivers come to all messages without
                waiting for this rank; ``None``: all, and with them the batch.
        """
        if micro_batches is None:
            for hop in (self._hops or {}).values():
                hop.end()
            self._hops = None
            self._returned.clear()
            self._used.clear()
            # A buffer that nobody fills would take the first message of the next batch.
            if self._posted:
                raise CommunicationError(f"internal error: {len(self._posted)} messages were posted and never used.")
        over = set(self._under_way if micro_batches is None else micro_batches)
        fresh: dict[_PlanKey, BoundaryPlan] = {}
        keys = [key for key in self.transfers if key.micro_batch in over]
        for key in sorted(keys, key=lambda key: (key.pipe, key.stage, key.to, key.micro_batch)):
            transfer = self.transfers.pop(key)
            _end(transfer.works)
            # It went by this plan, so there is nothing new to learn from it.
            if transfer.plan is self._plan(key):
                continue
            boundary = self._boundary(key)
            fresh[boundary] = _learnt(fresh.get(boundary) or self._plans.get(boundary), transfer)
        for micro_batch in over:
            self._under_way.pop(micro_batch, None)
        if fresh and self._under_way:
            self._plans = self._plans.copy()  # what is under way keeps the plans that it has
        self._plans.update(fresh)

    def _boundary(self, key: BoundaryKey) -> _PlanKey:
        return key.pipe, key.stage, key.to, self._under_way[key.micro_batch][1]

    def _plan(self, key: BoundaryKey) -> BoundaryPlan | None:
        """The plan by which a micro-batch crosses a boundary."""
        return self._under_way[key.micro_batch][0].get(self._boundary(key))

    def forget(self) -> None:
        """Forget all plans; what is under way keeps those that it has. At the same micro-batch on all ranks."""
        self._plans = {}

    def reset(self) -> None:
        """Forget a batch that was given up."""
        self._hops = None
        for each in (self.transfers, self._under_way, self._posted, self._kept, self._returned, self._used):
            each.clear()

    def _send(
        self, lane: Lane, key: BoundaryKey, peer: int, layout: MessageLayout, words: Words, data: _Data, steady: bool
    ) -> list[Work]:
        said = words if (hop := self._hop(lane, key)) is None else hop.say(key.micro_batch, words, steady)
        works = [*self.transport.send_parts(layout, words, data, peer, lane)]
        if said is not None and not self.transport.inline_control:
            works.append(self.transport.send_object(said, peer, key.tag(_CONTROL[lane.direction])))
        return works

    def _post(self, lane: Lane, key: BoundaryKey, peer: int, layout: MessageLayout) -> None:
        words: Callable[[], Words] = partial(self.transport.receive_object, peer, key.tag(_CONTROL[lane.direction]))
        if (hop := self._hop(lane, key)) is not None:
            words = hop.expect(key.micro_batch, words)
        self._posted[lane.direction, key] = self.transport.receive_parts(layout, peer, lane, words)

    def _hop(self, lane: Lane, key: BoundaryKey) -> Hop | None:
        return None if self._hops is None else self._hops[lane.direction, key.pipe, key.stage, key.to]


def _end(works: Iterable[Work]) -> None:
    """Wait for sends; where the receiver is known to have their messages nobody waits, and their memory is free."""
    for work in works:
        work.wait()


def _learnt(plan: BoundaryPlan | None, transfer: Transfer) -> BoundaryPlan:
    """The plan after a transfer that has not gone by this one."""
    path, used = transfer.plan.path, transfer.plan.all
    if transfer.used is not None:
        used = transfer.used | path.single_numbers
    if plan is not None and plan.path == path:  # of those that were under way together
        return plan if used.isdisjoint(transfer.plan.all - plan.all) else BoundaryPlan.of(path, used | plan.all)
    if plan is not None and plan.path == path.with_values(plan.path.values):
        used = transfer.plan.all  # what later stages use may follow from the values
    return BoundaryPlan.of(path, used)


def _agreement(plan: BoundaryPlan, path: RunRecord) -> int:
    """Whether a run took the planned path, and everything that is to travel is there, in the planned form."""
    if path.entries != plan.path.entries:
        found, planned = ({entry.number: entry for entry in each.entries} for each in (path, plan.path))
        # something may keep a tensor alive that nothing kept before, and may use it
        if found.keys() - planned or any(found.get(number) != planned[number] for number in plan.numbers):
            return _CHANGED
    if path.calls == plan.path.calls:
        return _AGREED
    all_travel = len(plan.numbers) == len(plan.path.entries)
    return _VALUES if all_travel and path.with_values(plan.path.values).calls == plan.path.calls else _CHANGED
