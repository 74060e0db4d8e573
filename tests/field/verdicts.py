"""Judges a run on a pipeline by the same run on one device, and finds the remedy that an error names."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch

# Of 1 + the magnitude, in double precision or not. Transformers computes some losses in single precision always.
TOLERANCES = {True: 1e-6, False: 1e-3}

EQUAL, SLICED = "equal", "equal to the same slices, as the plan says"
REMEDIED = "equal after the remedy"
SILENT, WARNED = "silently different", "different, with a warning"
UNCLEAR, REFUSED, CRASHED = "unclear error", "clear refusal", "crash"
UNTRAINABLE, RANDOM = "does not train on one device", "draws numbers, so not comparable"
NOT_COUNTED = (UNTRAINABLE, RANDOM)
VERDICTS = (EQUAL, SLICED, REMEDIED, SILENT, WARNED, UNCLEAR, REFUSED, CRASHED, *NOT_COUNTED)

# Options that a user can paste from a message. Another schedule, or fewer devices, would answer another question.
_NAMES = "layers|micro_batches|passes|loss_weight|balance|deferred_batch_norm"
_OPTION = re.compile(rf"""\b({_NAMES})=(\[[^\]]*\]|"[^"]*"|'[^']*'|\w+)""")


def options(text: str) -> Iterator[tuple[str, Any]]:
    """The options of the strategy that a message names with a value that can be pasted, in their order."""
    for name, value in _OPTION.findall(text.replace("passes=n", "passes=2")):  # of two towers, or of two views
        with contextlib.suppress(ValueError, SyntaxError):  # of a word that stands for a value
            read = ast.literal_eval(value)
            if ... not in (read if isinstance(read, list) else [read]):  # what the user is to fill in
                yield name, read


def distances(found: dict[str, Any], expected: dict[str, Any], weights: str = "weights") -> tuple[float, float]:
    """The largest differences of losses and of weights; infinite where one run has what the other has not."""
    losses = _apart(*(torch.tensor(run["losses"], dtype=torch.float64) for run in (found, expected)))
    return losses, max(_apart(found["weights"].get(name), expected["weights"][name]) for name in expected[weights])


def _apart(one: torch.Tensor | None, other: torch.Tensor) -> float:
    if one is None or one.shape != other.shape:
        return float("inf")
    apart = ((one.double() - other.double()).abs() / (1 + other.double().abs())).flatten()
    return float(torch.cat([apart, torch.zeros(1)]).max().nan_to_num(nan=float("inf"), posinf=float("inf")))


def cut_into(log: str) -> int:
    """The number of micro-batches, as the printed plan has it."""
    found = re.search(r"batch\s+=\s+(\d+)\s+micro-batch", log)
    return int(found.group(1)) if found else 1


def on_numbers(warnings: list[str]) -> list[str]:
    """The warnings that may explain a difference."""
    return [warning for warning in warnings if "use_cache" not in warning]


def says_so(log: str) -> bool:
    """Whether plan or warnings say that batch norm sees micro-batches."""
    return re.search(r"batch\s+norm", log, re.IGNORECASE) is not None


def failure(error: dict[str, Any], tried: bool) -> str:
    """What kind of end an error is; ``tried``: its remedy, or the one before it, has been applied."""
    if error["ours"]:
        return UNCLEAR if tried else REFUSED
    return CRASHED if error["by_us"] else UNCLEAR
