"""Look-ups of attributes are told, and modules compile as before meanwhile."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.intercept.lookups import reads_told


class Reading(nn.Linear):
    gain = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Other(Reading):
    """Has a look-up of its own."""

    def __getattribute__(self, name: str) -> Any:
        return 3.0 if name == "gain" else super().__getattribute__(name)


@pytest.mark.parametrize("kind", [Reading, Other], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("watched", [["Module"], ["own"], ["Module", "own"]], ids="-".join)
def test_reads_are_told_and_watched_modules_compile_as_a_whole(kind: type[Reading], watched: list[str]) -> None:
    told: list[str] = []
    module, x = kind(2, 2), torch.ones(1, 2)
    expected = module(x)
    with ExitStack() as contexts:
        for name in watched:
            owner = nn.Module if name == "Module" else kind
            contexts.enter_context(reads_told(owner, lambda _, name: told.append(name)))
        assert torch.equal(module(x), expected)
        assert "forward" in told
        torch.compiler.reset()
        torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), expected)
    assert "__getattribute__" not in vars(nn.Module)
    assert "__getattribute__" not in vars(Reading)
