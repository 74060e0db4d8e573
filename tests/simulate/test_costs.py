"""Messages that occupy ranks and links, reductions, steps; and the published formulas beside the simulator."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest

from lightning_pipe import schedules
from lightning_pipe.errors import ScheduleError
from lightning_pipe.schedules import Chimera, GPipe, Kind, OneFOneB, read_csv
from lightning_pipe.schedules.dependencies import Links
from lightning_pipe.simulate import Costs, Link, simulate
from recipes.reproduce.closed_forms import chimera_critical_path, chimera_time

LINKS: tuple[Links, ...] = ("free", "directed", "shared")


def forward_and_backward(occupies: str, links: str = "free", micro_batches: int = 2) -> tuple[object, ...]:
    """GPipe on two ranks: starts of the second rank's actions, then those of the first's."""
    costs = Costs(10, 10, send=4, occupies=occupies, links=links)  # type: ignore[arg-type]
    timeline = simulate(GPipe().build(ranks=2, micro_batches=micro_batches), costs)
    first, second = timeline.compute
    return [event.start for event in first], [event.start for event in second]


def test_who_is_occupied_by_a_message() -> None:
    assert forward_and_backward("neither") == ([0, 10, 48, 58], [14, 24, 34, 44])
    # the sender's second forward starts when its first message is sent; so does the receiver's second backward
    assert forward_and_backward("sender") == ([0, 14, 52, 66], [14, 28, 38, 52])
    # the receiver takes each message in when it wants it: after its first forward, 24 to 28
    assert forward_and_backward("receiver") == ([0, 10, 52, 66], [14, 28, 38, 48])
    assert forward_and_backward("both") == ([0, 14, 52, 66], [14, 28, 38, 52])


def test_messages_queue_for_their_link() -> None:
    def makespan(links: str, **costs: object) -> object:
        return simulate(GPipe().build(2, 4), Costs(1, 1, send=5, links=links, **costs)).makespan  # type: ignore[arg-type]

    # four messages of 5 one after the other: the last arrives at 1 + 20, then forward and backward, then the same back
    assert makespan("free") == 4 + 5 + 1 + 4 + 5 + 1
    assert makespan("directed") == 1 + 20 + 1 + 1 + 20 + 1
    # GPipe uses the directions one after the other, 1F1B both at once
    assert makespan("shared") == makespan("directed")
    schedule = OneFOneB().build(4, 8)
    times = [simulate(schedule, Costs(10, 20, send=3, occupies="sender", links=links)).makespan for links in LINKS]
    assert times == [387, 387, 402]


def test_what_is_hidden_is_a_share() -> None:
    for wrong in (-0.5, "a", float("nan"), float("inf"), [0.5]):
        told = re.escape(f"Costs.overlap must be a number, 0 or more, got {wrong!r}.\nHint: Give one number")
        with pytest.raises(ScheduleError, match=told):
            simulate(GPipe().build(2, 1), Costs(overlap=wrong))  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"a share, at most 1, got 2\.\nHint: Give overlap=0.8"):
        simulate(GPipe().build(2, 1), Costs(overlap=2))


def test_reductions_and_steps_at_the_end_of_a_batch() -> None:
    schedule = OneFOneB().build(2, 2)
    whole = simulate(schedule).makespan
    beside, after = (simulate(schedule, Costs(reduce=2, step=1, overlap_reduce=flag)) for flag in (True, False))
    assert whole == 9
    # stage 1 is done at 7 and reduces until 9; stage 0 at 9, reduces until 11 and steps
    assert beside.makespan == after.makespan == 12
    steps = [event for event in beside.events if event.kind is Kind.STEP]
    assert [(event.rank, event.start) for event in steps] == [(0, 11), (1, 9)]

    twins = Chimera(sync="eager").build(4, 4)
    eager, lazy = (simulate(twins, Costs(reduce=3, overlap_reduce=flag)).makespan for flag in (True, False))
    assert (eager, lazy) == (19, 22)
    assert simulate(Chimera(sync="lazy").build(4, 4), Costs(reduce=3)).makespan == lazy


def test_a_step_without_a_flush_waits_for_its_reduction() -> None:
    schedule = schedules.get("pipedream").build(1, 4)
    assert simulate(schedule, Costs(1, 2, reduce=3, step=4)).makespan == 4 * 10


def test_errors() -> None:
    schedule = GPipe().build(2, 2)
    with pytest.raises(ScheduleError, match="occupies to be one of 'neither', 'sender'"):
        simulate(schedule, Costs(occupies="all"))  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"Costs\.step has 3 numbers"):
        simulate(schedule, Costs(step=[1, 2, 3]))
    for wrong in (-1, 1j, None, float("nan"), [1, "a"]):
        told = re.escape(f"Costs.forward must be a number, 0 or more, got {wrong!r}.\nHint: Give one number for all")
        with pytest.raises(ScheduleError, match=told):
            simulate(schedule, Costs(forward=wrong))  # type: ignore[arg-type]


def test_all_reduce_after_rabenseifner() -> None:
    link = Link(alpha=2, beta=Fraction(1, 10))
    assert link.all_reduce(100, 1) == 0
    assert link.all_reduce(100, 2) == 2 * 2 + 10
    assert link.all_reduce(100, 8) == pytest.approx(2 * 3 * 2 + 2 * 7 / 8 * 10)


def test_shares_of_an_all_reduce_have_a_latency_each() -> None:
    """Half the bytes of an all-reduce, by so many operations as there are members, of ``log2(r)`` latencies each."""
    link = Link(alpha=2, beta=Fraction(1, 10))
    assert link.all_shares(100, 1) == 0
    assert link.all_shares(100, 2) == 2 * 1 * 2 + 5
    assert link.all_shares(100, 8) == pytest.approx(8 * 3 * 2 + 7 / 8 * 10)


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (2, 3)])
def test_chimeras_model_is_the_simulation(forward: int, backward: int) -> None:
    """Without messages the critical path of Eq. (1) is exact, and so are reductions that only bubbles hide."""
    for depth in (2, 4, 6, 8):
        for micro_batches in (depth, 2 * depth, 3 * depth):
            schedule = Chimera().build(depth, micro_batches)
            for all_reduce in (0, 1, 3, 10):
                expected = simulate(schedule, Costs(forward, backward, reduce=all_reduce)).makespan
                assert chimera_time(depth, micro_batches, forward, backward, 0, all_reduce) == expected


def test_chimeras_model_with_messages() -> None:
    assert chimera_critical_path(6, 6) == (6, 10)
    assert chimera_time(6, 6, 1, 2) == 26
    # where the sender is busy until its message is sent, every pass on the critical path takes one message more
    assert chimera_time(6, 6, 1, 2, p2p=Fraction(1, 2)) == 26 + 8
    with pytest.raises(ScheduleError, match="an even number of stages"):
        chimera_time(5, 5, 1, 2)


def test_pairs_that_wait_for_each_other_name_the_overlap(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n")
    schedule = read_csv(path)
    assert simulate(schedule, Costs()).makespan > 0
    with pytest.raises(ScheduleError, match=r"deadlocks(?s:.*)Leave overlap out"):
        simulate(schedule, Costs(overlap=0.5))
