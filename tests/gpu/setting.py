"""Where a part runs."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

PLACE = torch.device("cuda", 0)
"""The device of a part that needs one."""


@dataclass(frozen=True)
class Setting:
    """Where a part runs.

    Args:
        devices: how many there are.
        small: sizes that a CPU goes through in seconds, for rehearsals.
    """

    devices: int = 1
    small: bool = False


def clear() -> None:
    """Give memory back that nobody uses."""
    gc.collect()
    torch.cuda.empty_cache()
