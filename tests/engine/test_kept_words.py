"""Control words that go unsaid over NCCL: how many are left, and that a program which changes trains right or raises.

The transport over NCCL runs between threads; a message of the host is one of Gloo's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe import schedules
from lightning_pipe.engine import kept_words
from lightning_pipe.engine.boundary_exchange import BoundaryExchange
from lightning_pipe.engine.kept_words import TELL_ALL, Hop
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CutError
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.topology import Topology
from tests.support.nccl.events import Issued
from tests.support.nccl.recording import RecordingTransport, record
from tests.support.pairs import slow_but

pytestmark = pytest.mark.usefixtures("float64")

WIDTH, BATCHES, LATE = 4, 12, 8
QUIET = [1, 1]
"""Messages that the host of each of two ranks sends in a batch: the words of the first micro-batch."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_words, "ENOUGH", 2)
    monkeypatch.delenv(TELL_ALL, raising=False)


class Net(nn.Module):
    """Two layers, one on each stage, with code of the step between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))


NO_INLINE: Any = SimpleNamespace(inline_control=False)
"""A transport whose control words travel by the host."""
Step = Callable[[Net, Tensor, int, int], Tensor]
"""``step(net, x, batch, micro_batch)``."""


def plain(net: Net, x: Tensor, *_: int) -> Tensor:
    return inside(net, x, lambda h: h)


def inside(net: Net, x: Tensor, between: Callable[[Tensor], Tensor], at: int = 0) -> Tensor:
    """Something between two layers, by default of the first stage."""
    for number, layer in enumerate(net.layers):
        x = torch.tanh(layer(x))
        if number == at:
            x = between(x)
    return x.square().mean()


def batch_of(number: int, rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))


@dataclass
class Ran:
    """By batch: how much each rank's host has sent, the losses and the gradients."""

    sent: list[list[int]]
    losses: list[list[float]] = field(default_factory=list)
    gradients: dict[tuple[int, str], Tensor | None] = field(default_factory=dict)


def train(
    step: Step,
    micro_batches: int = 4,
    schedule: str = "1f1b",
    ranks: int = 2,
    rows: Callable[[int], int] = lambda _: 8,
) -> Ran:
    """Train over as many ranks, and compare all losses and gradients with one device."""
    family, whole = schedules.get(schedule), Net()
    stages = family.build(ranks, micro_batches).stages
    nets = [copy.deepcopy(whole) for _ in range(ranks)]
    ran = Ran([[0] * ranks for _ in range(BATCHES)], [[] for _ in range(BATCHES)])

    def body(transport: RecordingTransport) -> None:
        net = nets[transport.process]
        pipeline = Pipeline(net, find_layers(net, "layers"), [4 // stages] * stages, family, transport)
        pipeline.partition()
        for number in range(BATCHES):
            begun = len(transport._events)
            parts = batch_of(number, rows(number)).tensor_split(micro_batches)
            weights = [len(part) / rows(number) for part in parts]
            results = pipeline.train(lambda index, part: step(net, part, number, index), parts, weights)  # noqa: B023
            new = transport._events[begun:]
            ran.sent[number][transport.rank] = sum(of_host(event) for event in new)
            ran.losses[number] += [results[index].item() for index in sorted(results)]
            for name, parameter in pipeline.local_parameters():
                ran.gradients[number, name], parameter.grad = parameter.grad, None
        pipeline.restore()

    loss_rank = family.build(ranks, micro_batches).loss_ranks[0]
    record(Topology(ranks, loss_rank=loss_rank), body)
    for number in range(BATCHES):
        parts = batch_of(number, rows(number)).tensor_split(micro_batches)
        losses = [step(whole, part, number, index) for index, part in enumerate(parts)]
        assert sorted(ran.losses[number]) == pytest.approx(sorted(loss.item() for loss in losses))
        sum(loss * len(part) / rows(number) for loss, part in zip(losses, parts, strict=True)).backward()
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(ran.gradients[number, name], parameter.grad)
            parameter.grad = None
    return ran


def of_host(event: Any) -> bool:
    return isinstance(event, Issued) and event.group.backend == "gloo" and event.verb == "send"


# ------------------------------------------------------------------ how many


@pytest.mark.parametrize(
    ("schedule", "quiet"),
    slow_but([("1f1b", 1), ("gpipe", 1), ("zero_bubble", 1), ("chimera", 2)], ("chimera", 2)),
)
def test_messages_of_the_host_do_not_grow_with_micro_batches(schedule: str, quiet: int) -> None:
    for micro_batches in (2, 4):
        sent = train(plain, micro_batches, schedule).sent
        assert sent[1] == [micro_batches + 1] * 2  # and what forward passes have changed, in the first batches
        assert sent[LATE:] == [[min(quiet, micro_batches)] * 2] * (BATCHES - LATE)


# ------------------------------------------------------------------ programs that change


def test_another_path_from_some_batch_on_is_said_at_its_beginning() -> None:
    def step(net: Net, x: Tensor, batch: int, _: int) -> Tensor:
        return inside(net, x, lambda h: h * 2 if batch >= 6 else h)

    sent = train(step).sent
    # the first rank says it; the gradients are as before
    assert sent[5] == sent[LATE + 3] == QUIET
    assert sent[6][0] > 4
    assert sent[7][0] == 4


def test_shapes_that_take_turns_are_quiet_each_by_itself() -> None:
    sent = train(plain, rows=lambda batch: 8 if batch % 2 else 4).sent
    assert sent[-2:] == [QUIET, QUIET]


def gone_once(net: Net, x: Tensor, batch: int, micro_batch: int) -> Tensor:
    """One micro-batch of a late batch brings no gradient back to the first stage."""
    return inside(net, x, lambda h: h.detach() if (batch, micro_batch) == (LATE, 2) else h, at=2)


def other_once(net: Net, x: Tensor, batch: int, micro_batch: int) -> Tensor:
    """One micro-batch of a late batch leaves the first stage by another path."""
    return inside(net, x, lambda h: h * 2 if (batch, micro_batch) == (LATE, 2) else h)


@pytest.mark.parametrize("step", slow_but([gone_once, other_once], other_once))
def test_a_micro_batch_that_differs_in_a_quiet_batch_raises_and_with_all_words_said_trains(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CutError, match=r"micro-batch 2 takes another path.*") as raised:
        train(step)
    assert raised.value.hint is not None
    assert f"{TELL_ALL}=1" in raised.value.hint
    monkeypatch.setenv(TELL_ALL, "1")
    train(step)


def test_a_path_that_reads_values_is_said_each_time() -> None:
    def step(net: Net, x: Tensor, batch: int, micro_batch: int) -> Tensor:
        last = (batch, micro_batch) == (LATE, 2)
        return inside(net, x, lambda h: h * 2 if h.sum() > (-1e9 if last else 1e9) else h)

    assert train(step).sent[-1] == [4, 4]


# ------------------------------------------------------------------ one hop


def both(batches: list[list[list[int] | None]], heard: list[int] | None = None) -> list[int]:
    """How much each batch says; ``None`` are words that may change any time, ``heard`` is the receiver's order."""
    said, sender, receiver = [], Hop(), Hop()
    for batch in batches:
        sent: dict[int, list[int]] = {}
        words = [[9] if each is None else each for each in batch]
        for number, each in enumerate(batch):
            if (told := sender.say(number, words[number], each is not None)) is not None:
                sent[number] = told
        said.append(len(sent))
        hear = [
            receiver.expect(number, lambda number=number, sent=sent: sent.pop(number)) for number in range(len(batch))
        ]
        order = range(len(batch)) if heard is None else heard
        assert [hear[number]() for number in order] == [words[number] for number in order]
        assert not sent
        sender.end()
        receiver.end()
    return said


def test_words_are_heard_in_any_order() -> None:
    assert both([[[1], [2], [3]]] * 6, heard=[2, 0, 1]) == [3, 3, 3, 1, 1, 1]


def test_after_a_batch_that_begins_otherwise_as_many_equal_ones_are_wanted() -> None:
    assert both([[[1], [2]]] * 4 + [[[3], [2]]] + [[[1], [2]]] * 4) == [2, 2, 2, 1, 2, 2, 2, 2, 1]


def test_after_a_batch_that_changed_behind_its_beginning_all_words_are_said() -> None:
    assert both([[[1], [2]], [[1], [3]], *[[[1], [2]]] * 5]) == [2] * 7


def test_words_that_may_change_any_time_are_said() -> None:
    assert both([[None, [2]]] * 5) == [2] * 5
    assert both([[[1], None]] * 5) == [2] * 5


def test_a_sender_that_has_said_nothing_new_must_not_differ() -> None:
    hop = Hop(kept={0: [1], 1: [2]}, equal=math.inf)
    assert hop.say(0, [1], steady=True) == [1, True]
    with pytest.raises(CutError, match="micro-batch 1"):
        hop.say(1, [3], steady=True)


def test_kinds_of_batches_are_kept_apart_and_many_are_forgotten_together() -> None:
    words = BoundaryExchange(NO_INLINE)
    words.begin_batch("short")
    assert words._hops is not None
    short = words._hops["forward"]
    words.end()
    assert words._hops is None
    words.begin_batch("long")
    assert words._hops["forward"] is not short
    words.end()
    words.begin_batch("short")
    assert words._hops["forward"] is short
    for kind in range(1000):
        words.begin_batch(kind)
        words.end()
    assert len(words._kept) < 100


def test_words_are_forgotten_with_a_batch_that_failed() -> None:
    words = BoundaryExchange(NO_INLINE)
    words.begin_batch("kind")
    assert words._hops is not None
    before = words._hops["forward"]
    words.end()
    words.reset()
    words.begin_batch("kind")
    assert words._hops["forward"] is not before
