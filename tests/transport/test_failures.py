"""One rank failing ends all with its traceback; after a hang every rank says where it stands."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

from lightning_pipe import schedules
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CommunicationError
from lightning_pipe.partition import find_layers
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.failures import FailureBoard, default_store, leave
from lightning_pipe.transport.topology import Topology
from tests.support import processes
from tests.support.pairs import pairs, slow_but
from tests.support.processes import outcomes
from tests.support.threads import thread_world


def misbehave(fault: str) -> None:
    if fault == "raise":
        raise ValueError("the stage's own words")
    if fault == "exit":
        os._exit(5)
    time.sleep(100)


class Faulty(nn.Module):
    """A layer that misbehaves on its fifth call."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.fault = fault
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fault and self.calls == 5:
            misbehave(self.fault)
        out: Tensor = self.linear(x)
        return out


def train(transport: Transport, fault: str, at: int, watch: bool = True) -> None:
    """What a strategy does around batches, with a layer of the user's that misbehaves."""
    ranks = transport.topology.ranks
    module = nn.Sequential(*(Faulty(fault if rank == at else "") for rank in range(ranks)))
    pipeline = Pipeline(module, find_layers(module), [1] * ranks, schedules.get("1f1b"), transport)
    board = FailureBoard(default_store(), transport)
    if watch:
        board.watch(interval=0.3, stall=transport.timeout.total_seconds() - 2, exit_after=2.0)
    try:
        for _ in range(4):
            pipeline.train(lambda _, part: module(part).sum(), [torch.ones(1, 2)] * 4, [0.25] * 4)
    except BaseException as error:
        board.fail(error)
        raise
    finally:
        board.close()


def run(fault: str, at: int, group_timeout: float = 30.0, **kwargs: Any) -> list[processes.Outcome]:
    topology = Topology(3, loss_rank=-1)
    return processes.pipeline_outcomes(
        train, topology, group_timeout=group_timeout, timeout=40, fault=fault, at=at, **kwargs
    )


@pytest.mark.parametrize(("at", "watch"), pairs([1, 0, 2], [True, False], lambda at, watch: (at, watch) == (0, 1)))
def test_a_rank_that_raises_takes_the_others_down_with_its_traceback(at: int, watch: bool) -> None:
    ended = run("raise", at, watch=watch)
    assert max(outcome.seconds for outcome in ended) < 10
    topology = Topology(3, loss_rank=-1)
    for outcome in ended:
        if outcome.process == topology.process(0, at):
            assert isinstance(outcome.error, ValueError)
        else:
            assert isinstance(outcome.error, CommunicationError), outcome.trace
            assert f"Rank {topology.process(0, at)}" in str(outcome.error)
            assert "failed first" in str(outcome.error)
            assert "in misbehave" in str(outcome.error)
            assert "ValueError: the stage's own words" in str(outcome.error)


@pytest.mark.parametrize("at", slow_but([0, 2], 2))
def test_a_rank_that_is_killed_takes_the_others_down(at: int) -> None:
    # With the reversed order process 0, which serves the store, is the last row of the schedule.
    ended = run("exit", at)
    assert max(outcome.seconds for outcome in ended) < 10
    dead = Topology(3, loss_rank=-1).process(0, at)
    for outcome in ended:
        expected = processes.ProcessDiedError if outcome.process == dead else CommunicationError
        assert isinstance(outcome.error, expected), outcome.trace


def test_a_hang_ends_at_the_timeout_and_every_rank_says_where_it_stands() -> None:
    ended = run("hang", 1, group_timeout=4.0)
    assert max(outcome.seconds for outcome in ended) < 14
    topology = Topology(3, loss_rank=-1)
    stood = r"has not come on since \d\d:\d\d:\d\d, \d+ s ago: "
    places = {
        0: r"backward, stage 0, micro-batch 0; waits to receive \d+ bytes from rank 1",
        1: r"forward, stage 1, micro-batch 0; computes in .*misbehave",
        2: r"forward, stage 2, micro-batch 0; waits to receive \d+ bytes from rank 1",
    }
    for rank, place in places.items():
        outcome = ended[topology.process(0, rank)]
        assert re.search(rf"{topology.describe(outcome.process).capitalize()} {stood}{place}", outcome.output)
        if rank != 1:
            assert isinstance(outcome.error, CommunicationError), outcome.trace
            assert re.search(stood, str(outcome.error))
    # The rank that hangs in its own code is ended by its watchdog.
    stuck = ended[topology.process(0, 1)]
    assert isinstance(stuck.error, processes.ProcessDiedError)
    assert "does not react and is ended" in stuck.output


def test_a_rank_that_computes_while_another_fails_stops_at_its_next_action() -> None:
    world = thread_world(Topology(2))
    store = HashStore()
    boards = [FailureBoard(store, transport) for transport in world]
    boards[1].fail(KeyError("x"))
    assert boards[0].find_failure() is not None
    boards[0].position = None  # the end of a batch is no place to raise
    with pytest.raises(
        CommunicationError, match=r"Rank 0 stops before F3(.|\n)*Rank 1 failed first(.|\n)*KeyError: 'x'"
    ):
        boards[0].position = "F3"


def test_consequences_are_not_published() -> None:
    world = thread_world(Topology(3))
    store = HashStore()
    boards = [FailureBoard(store, transport, patience=0.1) for transport in world]
    boards[1].fail(ValueError("origin"))
    error = boards[0].explain("Rank 0 could not go on.")
    boards[0].fail(error)
    boards[2].fail(RuntimeError("later"))
    failure = boards[2].find_failure()
    assert failure is not None
    assert failure.process == 1
    assert "origin" in failure.text


@pytest.mark.parametrize(("patience", "reads", "least", "most"), [(20.0, 0.2, 0.2, 10.0), (0.2, None, 0.2, 10.0)])
def test_process_0_ends_when_the_others_have_read_why(
    patience: float, reads: float | None, least: float, most: float
) -> None:
    """Or when they could have: one may have been killed. The store ends with process 0."""
    store = HashStore()
    boards = [FailureBoard(store, transport, patience=patience) for transport in thread_world(Topology(2))]
    if reads is not None:
        threading.Timer(reads, boards[1].find_failure).start()
    start = time.monotonic()
    boards[0].fail(ValueError("origin"))
    assert least <= time.monotonic() - start < most


def test_boards_of_two_runs_do_not_mix() -> None:
    world = thread_world(Topology(1))
    store = HashStore()
    first = FailureBoard(store, world[0])
    first.fail(ValueError("old"))
    first.close()
    second = FailureBoard(store, thread_world(Topology(1))[0])
    assert second.find_failure() is None


def test_a_watchdog_that_stands_still_itself_is_ended_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    board = FailureBoard(HashStore(), thread_world(Topology(2))[0])
    limits: list[float] = []
    cancelled = threading.Event()
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, **_: limits.append(seconds))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", cancelled.set)
    board.watch(interval=0.02, stall=10.0)
    time.sleep(0.2)
    assert len(limits) > 1  # before each look anew
    assert 10.0 < min(limits) < 20.0
    assert not cancelled.is_set()
    board.close()
    assert cancelled.is_set()


def leaving(process: int) -> None:
    sys.stdout = os.fdopen(1, "w")  # buffered, as that of a script into a file is
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    worker.start()
    print(worker.pid)
    leave(3)


def test_a_process_that_leaves_at_once_leaves_no_worker() -> None:
    # the worker would hold the pipe of the answer open, so that this waited for it
    (ended,) = outcomes(leaving, 1, timeout=30, group_timeout=None)
    assert str(ended.error) == "Process 0 ended with code 3."
    assert int(ended.output)  # written in spite of the hurry
