"""Counters outside of modules are named in a warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import nn

from lightning_pipe.trainer.global_numbers import GlobalNumbers
from tests.trainer import test_layer_state
from tests.trainer.test_layer_state import Model, found

COUNTER, FLAG = 0, False


class Part(nn.Module):
    gain = 1.0


class Derived(Part):
    pass


def _count() -> None:
    global COUNTER, FLAG
    COUNTER += 1
    FLAG = True


def _scale() -> None:
    Part.gain *= 0.5


@pytest.mark.parametrize(("changes", "name"), [(_count, r"test_global_numbers\.COUNTER"), (_scale, r"Part\.gain")])
def test_a_number_that_changes_in_a_batch_is_named_once(changes: Any, name: str) -> None:
    numbers = GlobalNumbers([Derived()])
    changes()
    numbers.begin()
    changes()
    with pytest.warns(UserWarning, match=rf"change `(\w+\.)*{name}` outside of modules"):
        numbers.end()
    numbers.begin()
    changes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        numbers.end()


def test_what_stays_as_it_is_is_not_named() -> None:
    numbers = GlobalNumbers([Derived()])
    _count()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(9):
            numbers.begin()
            numbers.end()
        _count()
        numbers.end()


class Counts(Model):
    factor = 1.0

    def before(self, resets: bool) -> None:
        type(self).factor *= 0.9


def test_a_step_that_counts_in_its_class_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_layer_state, "quiet", lambda: None)
    with pytest.warns(UserWarning, match=r"change `Counts\.factor` outside of modules"):
        found(0, 1, Counts, stages=2, micro_batches=2)
