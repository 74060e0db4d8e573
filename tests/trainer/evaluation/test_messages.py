"""Batches that wait for the next report travel with it, and come in their order."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pipe.trainer.evaluation.messages import EvaluationMessages
from lightning_pipe.transport.base import DONE, Work

SENDER, MEMBERS = 0, (0, 1, 2)


class Wires:
    """What three processes of one pipeline have sent each other and not read yet."""

    def __init__(self) -> None:
        self.sent = {member: deque[Any]() for member in MEMBERS}

    def messages(self, process: int) -> EvaluationMessages:
        """Those of a process."""

        def send_object_to(obj: Any, peers: list[int], tag: int) -> Work:
            for peer in peers:
                self.sent[peer].append(obj)
            return DONE

        transport = SimpleNamespace(
            process=process,
            topology=SimpleNamespace(locate=lambda member: (0, member)),
            send_object_to=send_object_to,
            receive_object=lambda peer, tag: self.sent[process].popleft(),
        )
        pipeline: Any = SimpleNamespace(transport=transport, pipeline_members=MEMBERS)
        return EvaluationMessages(pipeline, ahead=4)


@pytest.fixture
def wires() -> Wires:
    return Wires()


def test_a_batch_goes_at_once_and_a_held_one_with_the_next_report(wires: Wires) -> None:
    sender, receiver = wires.messages(SENDER), wires.messages(1)
    assert sender.batch("batch 0", SENDER) == "batch 0"
    with sender.holding():
        sender.batch("batch 1", SENDER)
        sender.batch("the end", SENDER)
    assert len(wires.sent[1]) == 1
    assert sender.report("report 0", SENDER) == "report 0"
    assert len(wires.sent[1]) == 2
    assert receiver.batch(None, SENDER) == "batch 0"
    assert receiver.report(None, SENDER) == "report 0"
    assert [receiver.batch(None, SENDER), receiver.batch(None, SENDER)] == ["batch 1", "the end"]


def test_what_is_held_goes_before_what_comes_later(wires: Wires) -> None:
    sender, receiver = wires.messages(SENDER), wires.messages(2)
    with sender.holding():
        sender.batch("batch 0", SENDER)
    sender.batch("batch 1", SENDER)
    sender.report("report 0", SENDER)
    assert [receiver.batch(None, SENDER), receiver.batch(None, SENDER)] == ["batch 0", "batch 1"]
    assert receiver.report(None, SENDER) == "report 0"
