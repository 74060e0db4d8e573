"""What a step changes on devices, over NCCL: the verdicts of `test_state_contract`, though nobody reads a value there.

On the fake device (rehearsed). A word of a tensor on a device is what it went through.
"""

from __future__ import annotations

import pytest

from tests.support.fake_cuda.call import rehearse
from tests.support.state_programs import PROGRAMS
from tests.trainer.test_state_contract import PHASES, Cell, Left, amiss, ended, verdict

pytestmark = pytest.mark.rehearsed

OF_THE_CPU = frozenset(["NoiseBefore", "BatchByItsArray", "SparseBefore"])
"""Programs that draw on the device, whose generator draws other numbers, that take arrays of the batch, and with
sparse tensors, of which the fake device has none.
"""
HOLE = "HiddenParameterBefore"
"""Of an evaluation, whose batches have one micro-batch."""
FAST = ["BufferInPlaceBefore", "TableBefore", "LeafBefore"]


def on_devices(cells: list[Cell]) -> dict[Cell, list[Left]]:
    """A process may be ended behind an error there, so each program that is told has a world of its own."""
    equal = [cell for cell in cells if not PROGRAMS[cell[2]].expected(*cell[:2])]
    found = dict[Cell, list[Left]]()
    for world in filter(None, (equal, *([cell] for cell in cells if cell not in equal))):
        found |= ended(world, accelerator="gpu")
    return found


def wrong(names: list[str], phase: str, schedule: str) -> dict[Cell, str]:
    """By program what is not as it is owed."""
    left = rehearse(on_devices, [(phase, schedule, name) for name in names], timeout=1500)
    found = {cell: amiss(cell, verdict(cell, each)) for cell, each in left.items()}
    return {cell: each for cell, each in found.items() if each}


@pytest.mark.timeout(120)
def test_equal_or_told_on_devices() -> None:
    assert not wrong(FAST, "train", "1f1b")


@pytest.mark.slow
@pytest.mark.timeout(3200)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("phase", PHASES)
def test_all_programs_are_equal_or_told_on_devices(phase: str, schedule: str) -> None:
    hole = HOLE if phase == "evaluate" else ""
    assert not wrong([name for name in PROGRAMS if name not in (*OF_THE_CPU, hole)], phase, schedule)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xfail(strict=True, reason="a known hole of docs/state.md")
def test_what_is_no_attribute_and_changes_in_another_batch_is_told_on_devices() -> None:
    assert not wrong([HOLE], "evaluate", "1f1b")
