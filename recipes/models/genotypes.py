"""The cells of AmoebaNet-B and -D as data (Real et al., 2019, in the form of the released code).

A cell computes five new states from two given ones: state 0 is the output of the cell before, state 1 that of the one
before it. Each new state is the sum of two operations on earlier states; some states are concatenated to the output.
"""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """One operation of a cell.

    Args:
        operation: a name in `recipes.models.amoebanet.OPERATIONS`.
        state: the number of the state that it takes.
    """

    operation: str
    state: int


class CellPlan(NamedTuple):
    """A kind of cell.

    Args:
        steps: two for every new state; the first two give state 2.
        output: states that are concatenated.
    """

    steps: tuple[Step, ...]
    output: tuple[int, ...]


class Genotype(NamedTuple):
    """The two kinds of cells of a network: one keeps the image's size, one halves it."""

    normal: CellPlan
    reduction: CellPlan


def _steps(text: str) -> tuple[Step, ...]:
    pairs = (word.rstrip(")").split("(") for word in text.replace("|", " ").split())
    return tuple(Step(operation, int(state)) for operation, state in pairs)


# AmoebaNet-D's paper draws the normal cell's output as states 4, 5, 6. Only that of the released code, below, gives the
# parameters that GPipe and torchgpipe publish.
AMOEBANET_D = Genotype(
    normal=CellPlan(
        _steps("1x1(1) max3(1) | none(1) 1x7_7x1(0) | 1x1(0) 1x7_7x1(0) | max3(2) none(2) | avg3(1) 1x1(5)"),
        output=(0, 3, 4, 6),
    ),
    reduction=CellPlan(
        _steps("max2(0) max3(0) | none(2) 3x3(1) | 1x7_7x1(2) max3(2) | none(3) max2(1) | avg3(2) 1x1(3)"),
        output=(4, 5, 6),
    ),
)

AMOEBANET_B = Genotype(
    normal=CellPlan(
        _steps("1x1(1) max3(1) | none(1) sep3(0) | 1x1(1) sep3(0) | 1x1(2) none(2) | avg3(1) 1x1(5)"),
        output=(0, 3, 4, 6),
    ),
    reduction=CellPlan(
        _steps("max2(0) max3(0) | none(2) 3x3(1) | sep5(2) max3(2) | none(3) sep3(1) | avg3(4) 1x1(3)"),
        output=(5, 6),
    ),
)
