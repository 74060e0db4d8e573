"""Patches of torch ask for the run of their own thread."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from lightning_pipe.intercept.torch_patches.patch import current_run, installed


def test_a_thread_sees_its_own_run_alone() -> None:
    owner, own = SimpleNamespace(attribute=1), object()
    places = [(owner, "attribute", 2)]
    seen: list[Any] = []
    run: Any = own

    def current() -> Any:
        return run

    with installed(places, current):
        other = threading.Thread(target=lambda: seen.append(current_run()))
        other.start()
        other.join(10)
        assert current_run() is own
        assert vars(owner) == {"attribute": 2}
        with installed(places, current):
            assert current_run() is own
        with installed(places, lambda: None):
            assert current_run() is None
        assert current_run() is own
    assert seen == [None]
    assert current_run() is None
    assert vars(owner) == {"attribute": 1}
