"""The sizes at which every registered family is tested."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import product

from lightning_pipe import schedules
from lightning_pipe.schedules import Schedule

MICRO_BATCHES = (1, 2, 3, 4, 5, 7, 8, 9)
EVEN_RANKS = {"bitpipe", "chimera", "dualpipe"}


def ranks_of(name: str) -> tuple[int, ...]:
    """Numbers of ranks that a family can have."""
    return (2, 4, 6) if name in EVEN_RANKS else (1, 2, 3, 4, 6)


def training_schedules(name: str) -> Iterator[Schedule]:
    """A family in all variants and small sizes, with its own number of stages and, on few ranks, with more."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no order of its own")
        for family, ranks, micro_batches in product(schedules.get(name).variants(), ranks_of(name), MICRO_BATCHES):
            plain = family.build(ranks, micro_batches)
            yield plain
            if ranks <= 3:
                yield family.build(ranks, micro_batches, plain.stages + 1)
                yield family.build(ranks, micro_batches, plain.stages + ranks)
