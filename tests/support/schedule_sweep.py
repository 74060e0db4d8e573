"""The sizes at which every registered family is tested."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from lightning_pipe import schedules
from lightning_pipe.schedules import Schedule
from tests.support.pairs import slow_but

EVEN_RANKS = {"bitpipe", "chimera", "dualpipe"}


@dataclass(frozen=True)
class Sweep:
    """A family in all variants and small sizes, with its own number of stages and, on few ranks, with more.

    Args:
        name: of the family.
        every: whether the sizes are many.
    """

    name: str
    every: bool = False

    def __str__(self) -> str:
        return self.name + "-every" * self.every

    def __iter__(self) -> Iterator[Schedule]:
        return iter(_built(self))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of ranks that the family can have."""
        if self.name in EVEN_RANKS:
            return (2, 4, 6) if self.every else (2, 4)
        return (1, 2, 3, 4, 6) if self.every else (1, 2, 3)

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Numbers of micro-batches."""
        return (1, 2, 3, 4, 5, 7, 8, 9) if self.every else (1, 4, 5)


@cache
def _built(sweep: Sweep) -> list[Schedule]:
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no order of its own")
        for family, ranks, micro_batches in product(
            schedules.get(sweep.name).variants(), sweep.ranks, sweep.micro_batches
        ):
            plain = family.build(ranks, micro_batches)
            further = (plain.stages + 1, plain.stages + ranks) if ranks <= 3 else ()
            found += [plain, *(family.build(ranks, micro_batches, stages) for stages in further)]
    return found


FEW = [Sweep(name) for name in schedules.names()]
SWEEPS = slow_but([*FEW, *(Sweep(name, every=True) for name in schedules.names())], *FEW)
