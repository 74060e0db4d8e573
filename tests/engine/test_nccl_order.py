"""What the running engine issues for GPUs, recorded over threads, ends under NCCL's rules in every order.

Consistent with these rules: no test without GPUs can say more.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipe import schedules
from lightning_pipe.config import Sharding
from lightning_pipe.engine import kept_words
from lightning_pipe.engine.batch import Batch
from lightning_pipe.engine.executor import Executor
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.engine.streamed_evaluation import StreamedEvaluation
from lightning_pipe.partition import find_layers
from lightning_pipe.schedules import Action, Family, Kind
from lightning_pipe.trainer.checkpoints.entries import Owners, gather
from lightning_pipe.transport.base import COLLECTIVE_TAG, FIRST_OBJECT_TAG, Channel
from lightning_pipe.transport.nccl import NcclTransport
from lightning_pipe.transport.topology import Topology
from tests.support import asynchronous_engine, equality_sweep
from tests.support.engine_runs import split
from tests.support.equality_sweep import Point, performed
from tests.support.model_zoo import ZOO, Entry
from tests.support.nccl.events import Event, Issued
from tests.support.nccl.explore import explore
from tests.support.nccl.programs import ALL_RULES, Rules, programs
from tests.support.nccl.recording import RecordingTransport, record, recorded_into
from tests.support.pairs import pairs, slow_but
from tests.support.zoo.base import Regression, blocks

pytestmark = pytest.mark.usefixtures("float64")

NET = Entry("net", lambda: Regression(blocks(8)))
QUEUES = 8
"""Hardware queues of a process unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise."""
ENOUGH = {"bitpipe": 5}
"""Kernels at a time that a device needs on two ranks, where four are not enough: four stages are on each rank."""
GATHERED = FIRST_OBJECT_TAG + COLLECTIVE_TAG
"""The tag of messages that are part of a gather or broadcast of objects."""
Recorded = list[list[Event]]


def families(*, synchronous: bool) -> list[Family]:
    """All variants of all schedules."""
    variants = (variant for name in schedules.names() for variant in schedules.get(name).variants())
    return [variant for variant in variants if variant.synchronous == synchronous]


EXPLORABLE = [family for family in families(synchronous=True) if family.name != "bitpipe"]
"""Several batches of BitPipe, with four stages on each rank, have more states than can be explored."""


def topology_of(family: Family, ranks: int, stages: int, replicas: int = 1) -> Topology:
    loss_rank = family.build(ranks, 2 * ranks, stages=stages).loss_ranks[0]
    return Topology(ranks, replicas, loss_rank=loss_rank)


def trained(entry: Entry, point: Point) -> Recorded:
    """What a training issues, the connections and the first batch that learns among it."""
    modules = [entry.build() for _ in range(point.topology.world_size)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few micro-batches for the family
        return record(point.topology, lambda t: equality_sweep.train_rank(entry, modules[t.process], point, t))


def with_pipeline(
    fn: Callable[[Pipeline], Any], net: nn.Module, ranks: int = 2, family: Family | None = None, **options: Any
) -> Recorded:
    """What a function of a pipeline issues; by default of one stage per rank."""
    modules = [copy.deepcopy(net) for _ in range(ranks)]
    family = family or schedules.get("1f1b")
    stages = ranks * family.stages_per_rank

    def body(transport: RecordingTransport) -> None:
        layers = find_layers(modules[transport.process], "layers")
        even = [len(layers) // stages] * stages
        pipeline = Pipeline(modules[transport.process], layers, even, family, transport, **options)
        pipeline.partition()
        fn(pipeline)
        pipeline.restore()

    return record(topology_of(family, ranks, stages), body)


def train(pipeline: Pipeline, step: Callable[[int, Any], Any]) -> None:
    pipeline.train(step, *split(asynchronous_engine.batches(1)[0], 4))


def check(recorded: Recorded, resident: Sequence[int] = ()) -> None:
    """Nothing waits for ever: under all rules, and on devices for so many kernels at a time."""
    assert any(isinstance(event, Issued) and event.group.backend == "nccl" for event in recorded[0])
    for rules in ALL_RULES:
        found = explore(programs(recorded, rules))
        assert found.deadlock is None, f"{rules}: {found.deadlock}"
    for kernels in resident:
        found = explore(programs(recorded, Rules()), kernels)
        assert found.deadlock is None, f"{kernels} kernels: {found.deadlock}"


# ------------------------------------------------------------------ every schedule


def each(family: Family, *more: Any) -> Any:
    """A schedule is fast in all of these tests, and one of every kind in the first one."""
    return pytest.param(family, *more, marks=() if family.label == "interleaved" else pytest.mark.slow)


@pytest.mark.parametrize(
    "family",
    slow_but(
        families(synchronous=True),
        *map(schedules.get, ("1f1b", "chimera", "zero_bubble")),
    ),
    ids=lambda family: family.label,
)
def test_every_schedule_ends(family: Family) -> None:
    stages = family.build(2, 4).stages
    recorded = trained(NET, Point(family, stages, 3, ranks=2, steps=2))
    check(recorded, resident=[ENOUGH.get(family.name, 4)])
    # with room for one kernel a receive that is posted early leaves none for the send that it waits for
    assert explore(programs(recorded, Rules()), 1).deadlock is not None


@pytest.mark.parametrize("family", [*map(each, families(synchronous=True))], ids=lambda family: family.label)
def test_reductions_that_begin_between_messages_end(family: Family) -> None:
    stages = family.build(4, 8).stages
    # the first reduction of all is one that overlaps with backward passes
    check(trained(NET, Point(family, stages, 8, ranks=4, steps=1, accumulate=2, clip=None)))


@pytest.mark.parametrize(
    ("family", "sharded"),
    [
        *(each(family, "gradients") for family in EXPLORABLE),
        pytest.param(schedules.get("chimera"), True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_divided_updates_end(family: Family, sharded: Sharding) -> None:
    """Sums for owners between messages, values that are shared after the step, and flags of a norm over all."""
    stages = family.build(2, 4).stages
    point = Point(family, stages, 4, replicas=2, ranks=2, steps=2, accumulate=2, sharded=sharded)
    recorded = trained(ZOO["scale_in_two_stages"], point)
    verbs = {event.verb.split()[0] for events in recorded for event in events if isinstance(event, Issued)}
    assert ("reduce" in verbs) == (sharded == "gradients")
    check(recorded, resident=[QUEUES])


@pytest.mark.parametrize(
    ("family", "replicas"), pairs(families(synchronous=False), [1, 2], lambda family, replicas: family == replicas == 0)
)
def test_batches_in_flight_end(family: Family, replicas: int) -> None:
    net, data = asynchronous_engine.Net(), asynchronous_engine.batches(5)
    topology = topology_of(family, 3, 3, replicas)
    modules = [copy.deepcopy(net) for _ in range(topology.world_size)]

    # PipeDream steps after every micro-batch
    options: dict[str, Any] = {"stages": 3, "micro_batches": 2 if family.name == "pipedream_2bw" else 1, "drains": [3]}

    def body(transport: RecordingTransport) -> None:
        module = modules[transport.process]
        asynchronous_engine.train(transport, module, data, family, asynchronous_engine.sgd, **options)

    check(record(topology, body))


@pytest.mark.parametrize("family", [*map(each, EXPLORABLE)], ids=lambda family: family.label)
def test_hosts_that_run_ahead_of_each_other_end(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control words go unsaid, so no message of the host orders what the devices do."""
    monkeypatch.setattr(kept_words, "ENOUGH", 0)
    recorded = trained(NET, Point(family, family.build(4, 8).stages, 4, ranks=4, steps=3, clip=None))
    for events in recorded:
        sent = [event for event in events if isinstance(event, Issued) and event.verb == "send"]
        crossings = {event.content for event in sent if event.content is not None}
        # two batches that learn, and a third one with a word or two for four or two crossings of a hop
        words = [event for event in sent if event.group.backend == "gloo" and event.tag != GATHERED]
        assert len(words) <= 2.5 * len(crossings)
    check(recorded, resident=[QUEUES])


# ------------------------------------------------------------------ what models bring with them


@pytest.mark.parametrize(
    ("model", "point"),
    [
        *slow_but(
            [
                ("residual", Point("1f1b", 3, 3, replicas=2)),
                ("skips", Point("chimera", 4, 4)),
                ("scale_in_two_stages", Point("1f1b", 4, 3, accumulate=2, replicas=2)),
                ("skips", Point("1f1b", 4, 4)),
                ("statistics", Point("gpipe", 2, 3, evaluate=True)),
                ("odd_batches", Point("1f1b", 3, 3, evaluate=True, steps=4, recompute="always")),
            ]
        ),
        ("tied_to_layers", Point("zero_bubble", 4, 3, accumulate=2)),
    ],
    ids=lambda each: str(each),
)
def test_models_of_the_zoo_end(model: str, point: Point) -> None:
    check(trained(ZOO[model], point), resident=[QUEUES])


STREAMING = [schedules.get(name) for name in ("1f1b", "interleaved", "dualpipev", "chimera")]


@pytest.mark.parametrize("family", slow_but(STREAMING, STREAMING[1]), ids=lambda family: family.label)
def test_streamed_evaluations_end(family: Family) -> None:
    data = asynchronous_engine.batches(6, rows=(8, 8, 6))

    def stream(pipeline: Pipeline) -> None:
        streamed = StreamedEvaluation(pipeline)
        with torch.no_grad():
            for number, batch in enumerate(data):
                streamed.begin(number, lambda _, part: pipeline.module(**part), dict(batch))
            performed(streamed, len(data))
        streamed.end()

    check(with_pipeline(stream, asynchronous_engine.Net(depth=4), family=family), resident=[4])


def test_evaluations_in_turns_and_steps_of_several_passes_end() -> None:
    class Twice(asynchronous_engine.Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x, y) + super().forward(-x, y)

    def run(pipeline: Pipeline) -> None:
        def step(_: int, part: Any) -> Any:
            return pipeline.module(**part)

        for _ in range(2):
            train(pipeline, step)
        with torch.no_grad():
            pipeline.evaluate(step, [dict(asynchronous_engine.batches(1)[0])], turns=True)

    check(with_pipeline(run, Twice(), passes=2), resident=[6])


def test_checkpoints_between_batches_end() -> None:
    def run(pipeline: Pipeline) -> None:
        transport = pipeline.transport
        for _ in range(2):
            train(pipeline, lambda _, part: pipeline.module(**part))
            owners = Owners(pipeline.module, pipeline.owners, [[]] * 3, writer=0)
            whole = gather({"state_dict": pipeline.module.state_dict()}, owners, transport)
            assert (whole is None) == (transport.rank != 0)

    check(with_pipeline(run, asynchronous_engine.Net(), ranks=3), resident=[4])


def test_a_rank_that_fails_issues_nothing_more() -> None:
    recorded: Recorded = [[], []]
    issued: list[int] = []
    modules = [asynchronous_engine.Net() for _ in recorded]

    def operations(process: int) -> int:
        return sum(isinstance(event, Issued) for event in recorded[process])

    def stuck() -> str | None:
        return explore(programs([list(events) for events in recorded], Rules())).deadlock

    def body(transport: RecordingTransport) -> None:
        module = modules[transport.process]
        pipeline = Pipeline(module, find_layers(module, "layers"), [3, 3], schedules.get("1f1b"), transport)
        pipeline.partition()

        def step(index: int, part: Any) -> Any:
            if transport.rank == 1 and number == 1 and index == 2:
                issued.append(operations(transport.process))
                limit = time.monotonic() + 20
                while stuck() is None and time.monotonic() < limit:
                    time.sleep(0.01)  # the other rank has not come yet to what this one will not send
                raise RuntimeError("planted")
            return module(**part)

        for number in range(2):  # noqa: B007 - the step reads it
            train(pipeline, step)

    topology = Topology(2, loss_rank=-1)
    with pytest.raises(RuntimeError, match="planted"):
        recorded_into(recorded, topology, body)
    failed = topology.process(0, 1)
    assert operations(failed) == issued[0]
    # and the other rank is one that a watchdog must end
    assert f"process {1 - failed}: its host" in str(stuck())


# ------------------------------------------------------------------ planted faults


def test_two_sends_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Executor.run

    def swapped(self: Executor, actions: Sequence[Action], batch: Batch) -> None:
        order = list(actions)
        sends = [at for at, action in enumerate(order) if action.kind is Kind.SEND_FORWARD]
        if len(sends) > 1:
            # the second micro-batch of rank 0 must be ready when the first one leaves
            order.insert(sends[1], order.pop(sends[0]))
            order[sends[1]], order[sends[1] - 1] = order[sends[1] - 1], order[sends[1]]
            order.insert(sends[1] + 1, order.pop(sends[1] - 1))
        run(self, order, batch)

    monkeypatch.setattr(Executor, "run", swapped)
    recorded = trained(NET, Point("gpipe", 2, 3, steps=2))
    with pytest.raises(AssertionError, match="meets"):
        programs(recorded, Rules())


def test_one_communicator_for_both_directions_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = NcclTransport.connect

    def shared(self: NcclTransport, channels: Any) -> None:
        connect(self, channels)
        for channel in list(self._channels):
            low, high = sorted((channel.rank, channel.peer))
            self._channels[channel] = self._channels[Channel(low, high, channel.lane._replace(direction="forward"))]

    monkeypatch.setattr(NcclTransport, "connect", shared)
    found = explore(programs(trained(NET, Point("1f1b", 2, 3, steps=2)), Rules())).deadlock
    assert found is not None
    assert "(resident)" in found


def test_groups_that_are_not_opened_before_the_first_overlap_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NcclTransport, "open_groups", lambda self, groups: None)
    recorded = trained(NET, Point("gems", 4, 8, steps=1, accumulate=2, clip=None))
    assert explore(programs(recorded, Rules(creation="eager"))).deadlock is None
    assert "its host is at Meet(place=('communicator'" in str(explore(programs(recorded, Rules())).deadlock)
