"""What stands for a value that another stage has raises wherever it is read, and names who has it."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.absent_value import AbsentValue

READS: list[Callable[[Any], Any]] = [
    *[bool, len, iter, next, str, int, float, operator.index, abs, round, pickle.dumps],
    *[
        lambda absent: f"{absent}",
        lambda absent: absent.items,
        lambda absent: absent.append(1),
        lambda absent: absent(),
    ],
    *[lambda absent: absent + 1, lambda absent: 1 + absent, lambda absent: absent == 1, lambda absent: absent < 1],
    *[lambda absent: absent[0], lambda absent: 1 in absent, lambda absent: sum([absent])],
]


@pytest.mark.parametrize("read", READS)
def test_reading_it_raises(read: Callable[[Any], Any]) -> None:
    with pytest.raises(CutError, match=r"`self\.layers\.2\.calls` is read where it has no value: .* rank 1 has it"):
        read(AbsentValue("self.layers.2.calls", "rank 1"))


def test_counting_on_raises() -> None:
    absent: Any = AbsentValue("self.head.calls", "rank 1")
    with pytest.raises(CutError, match=r"self\.head\.calls"):
        absent += 1


def test_it_can_be_copied_and_shown_with_the_module_that_has_it() -> None:
    absent = AbsentValue("self.head.calls", "rank 1")
    assert copy.deepcopy([absent])[0] is copy.copy(absent) is absent
    assert repr(absent) == "<self.head.calls, which rank 1 has>"
    assert not hasattr(absent, "__array__")
