"""Evaluation steps that call the layers several times: what one device computes, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_pipe.errors import CutError
from lightning_pipe.skip import put, take
from lightning_pipe.transport.nonblocking_broadcast import PURPOSES, NonBlockingBroadcast
from tests.support.engine_runs import pipelined, unchanging
from tests.support.pairs import every_second, pairs
from tests.support.small_net import WIDTH, Block, Net, batch, batches

pytestmark = pytest.mark.usefixtures("float64")


class Twice(Net):
    """Trains with one pass; `several` does what an evaluation step does."""

    def one(self, h: Tensor, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(h), x))  # type: ignore[no-any-return]

    def several(self, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(self.one(x, x), self.one(x.flip(1), x)) + F.mse_loss(self.one(x, x), y)


class InARow(Twice):
    """Every layer is called three times before the next one."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(layer(layer(h)))
        return h


class BackAndForth(Twice):
    """Comes back to layers in an order of its own, leaves some out, and ends on an early one."""

    def several(self, x: Tensor, y: Tensor) -> Any:
        h = self.embed(x)
        for number in (3, 0, 2, 0, 0, 3, 1):
            h = self.layers[number](h) + h.mean()
        return self.layers[0](h)


class Memory:
    """An object that the layers fill, as a key-value cache."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.seen: dict[int, bool] = {}

    def length(self) -> int:
        return self.entries[0].rows.shape[0] if self.entries else 0


class Entry:
    """What one layer keeps."""

    rows: Tensor


class Remembering(Block):
    number = 0

    def forward(self, x: Tensor, memory: Memory | None = None) -> Tensor:
        x = super().forward(x)
        if memory is None:
            return x
        while len(memory.entries) <= self.number:
            memory.entries.append(Entry())
        entry = memory.entries[self.number]
        entry.rows = torch.cat([entry.rows, x]) if memory.seen.get(self.number) else x
        memory.seen[self.number] = True
        return x + entry.rows.mean(0)


class Remembers(Twice):
    """The layers keep what they have seen in an object, whose length the code between them reads."""

    block = Remembering

    def __init__(self) -> None:
        super().__init__()
        for number, layer in enumerate(self.layers):
            layer.number = number

    def several(self, x: Tensor, y: Tensor) -> Any:
        memory, h = Memory(), self.embed(x)
        for _ in range(3):
            for layer in self.layers:
                h = layer(h * (1 + memory.length()), memory)
        return torch.cat([entry.rows for entry in memory.entries] + [h])


class Reorders(Remembers):
    """Code between the layers makes anew what they keep, by what the last one has given, as beam search does."""

    def memory(self) -> Memory:
        return Memory()

    def several(self, x: Tensor, y: Tensor) -> Any:
        memory, h = self.memory(), self.embed(x)
        for _ in range(3):
            for layer in self.layers:
                h = layer(h, memory)
            order = h.sum(1).argsort()
            for entry in memory.entries:
                entry.rows = entry.rows[torch.cat([order] * (len(entry.rows) // len(order)))]
        return h


class ReordersTwice(Reorders):
    """The object of the first round has gone when the second one fills another; layers change what is in it alone."""

    def memory(self) -> Memory:
        memory = Memory()
        memory.entries = [Entry() for _ in self.layers]
        for number, entry in enumerate(memory.entries):
            entry.rows, memory.seen[number] = torch.empty(0, WIDTH), True
        return memory

    def several(self, x: Tensor, y: Tensor) -> Any:
        return super().several(x, y), super().several(x.flip(0), y)


class Fills(Remembering):
    """Changes in place what it keeps, as a key-value cache of fixed size, and its length."""

    def forward(self, x: Tensor, memory: Memory | None = None) -> Tensor:
        x = Block.forward(self, x)
        if memory is None:
            return x
        while len(memory.entries) <= self.number:
            memory.entries.append(Entry())
        entry: Any = memory.entries[self.number]
        if not memory.seen.get(self.number):
            entry.rows, entry.filled = torch.zeros(9, WIDTH), torch.tensor(0)
        memory.seen[self.number] = True
        entry.rows[int(entry.filled)] = x.mean(0)
        entry.filled += 1
        return x + entry.rows.sum(0)


class ReadsLength(Remembers):
    """The code between layers computes with a tensor that a layer has changed in place since it was read last."""

    block = Fills

    def several(self, x: Tensor, y: Tensor) -> Any:
        memory, h = Memory(), self.embed(x)
        for _ in range(3):
            for layer in self.layers:
                h = layer(h, memory)
            h = self.one(h * memory.entries[0].filled, x) + h  # type: ignore[attr-defined]
        return h, tuple(entry.rows for entry in memory.entries)


class ReadsOften(ReadsLength):
    """So do several ranks, and the code changes what the layer keeps as well."""

    def several(self, x: Tensor, y: Tensor) -> Any:
        memory, h, found = Memory(), self.embed(x), []
        for _ in range(2):
            for layer in self.layers:
                h = layer(h, memory)
                entries: list[Any] = list(memory.entries)
                h = h + sum(entry.filled * 0.1 + entry.rows[:5] for entry in entries)
                entries[-1].filled.add_(1)
                found.append([int(entry.filled) for entry in entries])
        return h, found, tuple(entry.rows for entry in memory.entries)


class Stashing(Block):
    first = last = False

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            put("early", x * 2)
        y = super().forward(x)
        if self.last:
            early = take("early")
            assert early is not None
            y = y + early
        return y


class Stashes(Twice):
    block = Stashing

    def __init__(self) -> None:
        super().__init__()
        first, last = self.layers[0], self.layers[3]
        first.first = last.last = True


RUNS = [{"ranks": 2}, {"ranks": 4, "schedule": "gpipe"}, {"ranks": 2, "schedule": "interleaved"}, {"ranks": 1}]


def evaluated(net: Twice, data: Any, context: Any = torch.inference_mode, **run: Any) -> list[Any]:
    """What the steps of several passes return over a pipeline that is trained with one."""
    found: list[Any] = []

    def evaluate(pipeline: Any, module: Any) -> None:
        with context():
            first = pipeline.evaluate(lambda _, part: module.several(**part), [data])
            if pipeline.transport.topology.ranks == 1:
                found.extend(first.values())
                return
            assert not first
            assert first is None or not pipeline.is_loss_rank
            found.extend(pipeline.evaluate(lambda _, part: module.several(**part), [data], turns=True).values())

    pipelined(net, batches(2), 2, between=evaluate, optimizer=unchanging, layers="layers", **run)
    assert len(found) == 2
    return found


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


MODELS = [Twice, BackAndForth, InARow, Reorders, Remembers, ReadsLength, ReordersTwice, Stashes, ReadsOften]


@pytest.mark.parametrize(
    ("model", "run"), pairs(MODELS, RUNS, lambda model, run: model % 2 == 0 and model % len(RUNS) == run)
)
def test_several_passes_give_what_one_device_gives(model: type[Twice], run: dict[str, Any]) -> None:
    net, data = model(), batch(5)
    for found in evaluated(net, data, **run):
        with torch.inference_mode():
            assert_equal(found, net.several(**data))


class Shares(Twice):
    """A view of a tensor is on another rank when the tensor changes in place."""

    def several(self, x: Tensor, y: Tensor) -> Any:
        h = self.layers[3](self.embed(x))  # on the last rank, after the embedding on the first one
        part = h[:, :3]
        g = self.layers[0](torch.cat([part, part], 1))  # the first rank asks for it
        g = self.layers[0](g + h)
        h = self.layers[3](h)
        return g, part, h


class LentView(Twice):
    """The first rank has the value of a view, and the last one then changes what it is a view of."""

    def part(self, h: Tensor) -> Tensor:
        return h[0]

    def several(self, x: Tensor, y: Tensor) -> Any:
        h = self.layers[3](x) * 1.0
        part = self.part(h)
        g = self.layers[0](x * 2.0)
        g = g + part  # on the first rank
        g = self.layers[3](g)
        h.mul_(2.0)
        return self.layers[0](g) + part


class LentCopy(LentView):
    """As the error of a view says."""

    def part(self, h: Tensor) -> Tensor:
        return h[0].clone()


@pytest.mark.parametrize(
    ("model", "context"),
    pairs([Shares, LentCopy, ReadsOften], [torch.inference_mode, torch.no_grad], every_second),
)
def test_what_changes_in_place_is_new_on_other_ranks(model: type[Twice], context: Any) -> None:
    net, data = model(), batch(5)
    for found in evaluated(net, data, context, ranks=2):
        with torch.no_grad():
            assert_equal(found, net.several(**data))


class ViewOfCopy(Twice):
    """The last rank has a value of the first one, and changes it by a view."""

    def several(self, x: Tensor, y: Tensor) -> Any:
        h = self.layers[0](x) * 1.0
        g = self.layers[3](h)
        h[0].mul_(2.0)
        return self.layers[0](g) + h, self.layers[3](g) + h


class ChangedView(Twice):
    """The first rank changes the value of a view, and the last one has what it is a view of."""

    def several(self, x: Tensor, y: Tensor) -> Any:
        h = self.layers[3](x) * 1.0
        part = h[0]
        g = self.layers[0](x * 2.0)
        part.mul_(2.0)  # on the first rank
        return self.layers[3](g) + h


@pytest.mark.parametrize(
    ("model", "context"),
    pairs([ChangedView, LentView, ViewOfCopy], [torch.inference_mode, torch.no_grad], every_second),
)
def test_a_change_in_place_that_another_rank_would_not_see_raises(model: type[Twice], context: Any) -> None:
    with pytest.raises(CutError, match="is changed in place, another tensor shares its memory") as caught:
        evaluated(model(), batch(5), context, ranks=2)
    assert "out-of-place form" in str(caught.value.hint)


class Derives(Twice):
    def several(self, x: Tensor, y: Tensor) -> Any:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            return torch.autograd.grad((self.one(x, x) + self.one(x, x)).sum(), x)[0]


def test_a_derivative_over_several_passes_raises() -> None:
    with pytest.raises(CutError, match="a backward pass"):
        evaluated(Derives(), batch(5), torch.no_grad, ranks=2)


def test_an_object_that_cannot_be_pickled_raises() -> None:
    class Open(Remembers):
        def several(self, x: Tensor, y: Tensor) -> Any:
            memory, h = Memory(), self.embed(x)
            memory.seen[9] = lambda: True  # type: ignore[assignment]
            for layer in self.layers:
                h = layer(h, memory)
            return h

    with pytest.raises(CutError, match=r"'layers\.0' changes its argument of type Memory"):
        evaluated(Open(), batch(5), ranks=2)


@pytest.mark.parametrize("purpose", PURPOSES)
def test_objects_of_broadcasts_that_are_on_their_way_are_not_taken_for_turns(purpose: int) -> None:
    """The rank that loads sends batches of a stream ahead, which may turn out to need turns."""
    net, data, found = Twice(), batch(), list[Any]()

    def evaluate(pipeline: Any, module: Any) -> None:
        transport, source = pipeline.transport, pipeline.transport.peers[pipeline.loss_ranks[0]]
        channel = NonBlockingBroadcast(transport)
        if transport.process == source:
            channel.share("a batch", source, purpose)
        with torch.inference_mode():
            found.extend(pipeline.evaluate(lambda _, part: module.several(**part), [data], turns=True).values())
        if transport.process != source:
            assert channel.share(None, source, purpose) == "a batch"

    pipelined(net, batches(1), 2, between=evaluate, layers="layers", ranks=3, optimizer=unchanging)
    assert_equal(found[0], net.several(**data))
