"""What the processes of a test world run: Trainers with a pipeline, and what the tests compare."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from tests import oracle, zoo


def quiet() -> None:
    """Silence what Lightning prints about itself."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def zoo_fit(process: int, cases: list[tuple[str, int, dict[str, Any], dict[str, Any]]]) -> list[oracle.Trace]:
    """Train some models of the zoo, one after the other in the same processes."""
    from lightning_pipe import PipeStrategy

    quiet()
    traces = []
    for name, batches, strategy, options in cases:
        entry = zoo.ZOO[name]
        traces.append(
            oracle.fit(
                entry.build(),
                entry.batches(batches),
                strategy=PipeStrategy(**{"layers": entry.layers, **strategy}),
                **options,
            )
        )
    return traces
