"""The judge itself: does it see a deadlock, a lane out of order, a receive nobody uses?"""

from __future__ import annotations

import pytest

from lightning_pipe.schedules import Action, Kind, OneFOneB, lower
from tests.support.rendezvous_sends import assert_mirrored, run


def lowered() -> list[list[Action]]:
    return [list(actions) for actions in lower(OneFOneB().build(ranks=2, micro_batches=3))]


def index_of(actions: list[Action], kind: Kind, micro_batch: int) -> int:
    return next(i for i, action in enumerate(actions) if (action.kind, action.micro_batch) == (kind, micro_batch))


def test_the_order_of_one_end_alone_matters() -> None:
    swapped = lowered()
    first, second = (index_of(swapped[1], Kind.RECEIVE_FORWARD, i) for i in (0, 1))
    swapped[1][first], swapped[1][second] = swapped[1][second], swapped[1][first]
    with pytest.raises(AssertionError):
        assert_mirrored(swapped)


def test_a_late_receive_is_a_deadlock() -> None:
    late = lowered()
    late[1].append(late[1].pop(index_of(late[1], Kind.RECEIVE_FORWARD, 1)))
    with pytest.raises(AssertionError, match="deadlock"):
        run(late, last_stage=1)


def test_a_missing_send_is_a_deadlock() -> None:
    missing = lowered()
    del missing[1][index_of(missing[1], Kind.SEND_BACKWARD, 2)]
    with pytest.raises(AssertionError, match="deadlock"):
        run(missing, last_stage=1)
