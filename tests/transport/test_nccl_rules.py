"""The model of NCCL's rules itself: which programs it lets end, and which not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.nccl.events import Computed, Event, Group, Issued, Made, Read, Waited
from tests.support.nccl.explore import explore
from tests.support.nccl.programs import ALL_RULES, Rules, programs

BOTH, THERE, BACK = Group(1, (0, 1), "nccl"), Group(2, (0, 1), "nccl"), Group(3, (0, 1), "gloo")
EAGER = Rules(unbatched="group", creation="eager")


def deadlock(*recorded: Sequence[Event], rules: Rules = EAGER, resident: int | None = None) -> str | None:
    """What is found if all processes make the groups first."""
    groups = sorted({event.group for events in recorded for event in events if isinstance(event, Issued)})
    return explore(programs([[*map(Made, groups), *events] for events in recorded], rules), resident).deadlock


def message(number: int, verb: str, group: Group, peer: int, size: int = 8) -> Issued:
    return Issued(number, group, verb, size, peer)


def crossing(first: Group, second: Group) -> list[list[Event]]:
    """Both ranks send before they receive."""
    return [
        [message(0, "send", first, 1), message(1, "receive", second, 1), Waited(1), Waited(0)],
        [message(0, "send", second, 0), message(1, "receive", first, 0), Waited(1), Waited(0)],
    ]


def test_a_communicator_for_each_direction_lets_them_pass() -> None:
    assert deadlock(*crossing(BOTH, THERE)) is None


@pytest.mark.parametrize("rules", [rules for rules in ALL_RULES if rules[:2] != ("group", "eager")])
def test_communicators_that_are_made_in_opposite_orders_hold_both_hosts(rules: Rules) -> None:
    found = deadlock(*crossing(BOTH, THERE), rules=rules)
    assert found is not None
    assert found.count("its host is at Meet(place=('communicator'") == 2


@pytest.mark.parametrize("verbs", [("reduce for 0", "reduce for 1"), ("reduce for 0", "all-reduce")])
def test_collectives_that_meet_are_the_same(verbs: tuple[str, str]) -> None:
    sums = [[Issued(number, BOTH, verb, 8), Waited(number)] for number, verb in enumerate(verbs)]
    assert deadlock([*sums[0], *sums[1]], [*sums[0], *sums[1]]) is None
    with pytest.raises(AssertionError, match="meets"):
        deadlock([*sums[0], *sums[1]], [*sums[1], *sums[0]])


def test_a_device_that_is_full_holds_up_other_streams() -> None:
    # rank 0 may start the receive first, whose answer needs the send behind it
    first = [message(0, "receive", THERE, 1), message(1, "send", BOTH, 1), Waited(0), Waited(1)]
    second = [message(0, "receive", BOTH, 0), Waited(0), message(1, "send", THERE, 0), Waited(1)]
    assert deadlock(first, second, resident=2) is None
    found = deadlock(first, second, resident=1)
    assert found is not None
    assert "send 8 bytes among [0, 1] in group 1 (not resident)" in found


def test_all_orders_of_starts_are_explored() -> None:
    # rank 0 has two receives: only one order of the two can end on a device for one kernel
    first = [message(0, "receive", BOTH, 1), message(1, "receive", THERE, 1)]
    second = [message(0, "send", THERE, 0), Waited(0), Computed("1F0"), message(1, "send", BOTH, 0)]
    assert deadlock(first, second, resident=1) is not None
    assert deadlock(first, second, resident=2) is None


def test_kernels_wait_for_what_was_launched_before_them() -> None:
    # the send of rank 0 holds what was received before, which never comes
    first = [message(0, "receive", THERE, 1), Waited(0), message(1, "send", BOTH, 1)]
    second = [message(0, "receive", BOTH, 0), Waited(0), message(1, "send", THERE, 0)]
    assert deadlock(first, second) is not None


def test_the_host_waits_where_it_reads() -> None:
    first = [message(0, "receive", THERE, 1), Waited(0), Read(), message(1, "send", BACK, 1)]
    second: list[Event] = [message(0, "receive", BACK, 0), Waited(0), message(1, "send", THERE, 0)]
    assert deadlock(first, second) is not None
    assert deadlock([first[0], *first[3:], *first[1:3]], second) is None


def test_a_collective_needs_all_members() -> None:
    group = Group(1, (0, 1, 2), "nccl")
    call = Issued(0, group, "all-reduce", 4)
    assert deadlock([call], [call], [call]) is None
    assert deadlock([call], [call], []) is not None


def test_making_a_group_needs_all_processes() -> None:
    for events, ends in (([], False), ([Made(BOTH)], True)):
        assert (explore(programs([[Made(BOTH)], [Made(BOTH)], events], EAGER)).deadlock is None) == ends


def test_an_exploration_that_is_cut_short_fails() -> None:
    recorded = [[Made(BOTH), Made(THERE), *events] for events in crossing(BOTH, THERE)]
    with pytest.raises(AssertionError, match="not explored"):
        explore(programs(recorded, EAGER), 1, most=1)
