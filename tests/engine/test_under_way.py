"""What one rank keeps between its actions."""

from __future__ import annotations

from lightning_pipe.engine.stage import Saved
from lightning_pipe.engine.under_way import BoundaryKey, StageKey, UnderWay
from lightning_pipe.intercept.call_record import RunRecord
from lightning_pipe.intercept.crossing import Crossing


def saved() -> Saved:
    return Saved(None, (), {}, None, set(), whole=False)


def test_the_most_forward_passes_that_waited_are_counted() -> None:
    under_way = UnderWay()
    for micro_batch in range(3):
        under_way.save(StageKey(0, 0, micro_batch), saved())
    under_way.saved.pop(StageKey(0, 0, 0))
    under_way.save(StageKey(0, 0, 3), saved())
    assert (len(under_way.saved), under_way.peak_held) == (3, 3)


def test_nothing_is_left_of_a_batch_that_failed() -> None:
    under_way, crossing = UnderWay(), Crossing(RunRecord((), ()), {})
    under_way.save(StageKey(0, 0, 0), saved())
    under_way.left[BoundaryKey(0, 0, 0, 1)] = crossing
    under_way.clear()
    assert under_way == UnderWay(peak_held=1)
