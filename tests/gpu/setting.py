"""Where a part runs."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Setting:
    """Where a part runs.

    Args:
        device: "cuda" or "cpu".
        devices: how many of them there are.
        small: sizes that a CPU goes through in seconds, for the tests of the parts.
    """

    device: str = "cuda"
    devices: int = 1
    small: bool = False

    @property
    def place(self) -> torch.device:
        """The device of a part that needs one."""
        import torch

        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    @property
    def accelerator(self) -> str:
        """The same for a Trainer."""
        return "gpu" if self.device == "cuda" else "cpu"

    def finish(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def clear(self) -> None:
        """Give memory back that nobody uses."""
        gc.collect()
        if self.device == "cuda":
            import torch

            torch.cuda.empty_cache()
