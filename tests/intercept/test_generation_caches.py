"""Model caches are off while steps run."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
from torch import nn

from lightning_pipe.intercept.generation_caches import Caches
from lightning_pipe.patches import all_replaced


def with_config(use_cache: object) -> nn.Module:
    module = nn.Sequential(nn.Linear(1, 1))
    module[0].config = SimpleNamespace(use_cache=use_cache)
    return module


def test_the_switch_is_put_back_after_an_error() -> None:
    module = with_config(True)

    def fails() -> None:
        with all_replaced(Caches(module, tells=False).off()):
            assert module[0].config.use_cache is False
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert module[0].config.use_cache is True


def test_it_is_told_once_and_only_where_something_is_switched() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for caches in (Caches(with_config(False)), Caches(with_config(True), tells=False)):
            with all_replaced(caches.off()):
                pass
    caches = Caches(with_config(True))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            with all_replaced(caches.off()):
                pass
    assert ["use_cache" in str(one.message) for one in told] == [True]
