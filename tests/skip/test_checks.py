"""What layers declare must fit together."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_pipe.skip import verify_skippables
from tests.skip.test_layers import Pop, Stash


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([Stash()], "is stashed by '0' and never popped"),
        ([Pop()], "is popped by '0' and stashed by no layer before it"),
        ([Pop(), Stash()], "is popped by '0' and stashed by no layer before it"),
        ([Stash(), Stash(), Pop()], "is stashed by '0' and again by '1'"),
        ([Stash(), Pop(), Pop()], "is popped by '1' and again by '2'"),
    ],
)
def test_what_does_not_fit_is_listed(layers: list[nn.Module], problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        verify_skippables(nn.Sequential(*layers))
