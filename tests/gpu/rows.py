"""The rows that parts find, their device, and models of the zoo on devices."""

from __future__ import annotations

import dataclasses
import gc
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tests.benchmarks.measure import Finding
from tests.support.model_zoo import Entry
from tests.support.oracle import Trace

PLACE = torch.device("cuda", 0)
"""The device of a part that needs one."""


def clear() -> None:
    """Give memory back that nobody uses."""
    gc.collect()
    torch.cuda.empty_cache()


def not_run(name: str, reason: str) -> Finding:
    """A row that stays open."""
    return Finding(name, f"NOT RUN: {reason}")


def is_open(row: Finding) -> bool:
    """Whether a row is one of `not_run`."""
    return row.value.startswith("NOT RUN")


def compared(name: str, compare: Callable[[], list[str]], target: str = "1e-9 from one device") -> Finding:
    """A row that says whether two runs are equal, and if not where; an error misses the target, and others follow.

    Args:
        name: of the row.
        compare: runs both and returns what differs.
        target: what counts as equal.
    """
    try:
        differences = compare()
    except ImportError as error:
        return not_run(name, str(error))
    except Exception as error:
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        return Finding(name, f"{type(error).__name__}: {lines[0]}", target, False)
    return Finding(name, differences[0] if differences else "equal", target, not differences)


def on_device(entry: Entry, device: torch.device) -> Entry:
    """A model of the zoo on a device, with the initial weights of the CPU; its batches are there as well."""
    return dataclasses.replace(
        entry,
        construct=lambda: entry.construct().to(device),
        batches=lambda number: moved(entry.batches(number), device),
    )


def moved(value: Any, device: torch.device | str) -> Any:
    """A structure with its tensors on a device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)


def moved_trace(trace: Trace) -> Trace:
    """A trace on the CPU, which pickles without the device."""
    return dataclasses.replace(trace, weights=moved(trace.weights, "cpu"))
