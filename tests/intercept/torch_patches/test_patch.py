"""Patches of torch ask for the run of their own thread."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from lightning_pipe.intercept.torch_patches.patch import Patch, installed


def test_a_thread_sees_its_own_run_alone() -> None:
    owner, own = SimpleNamespace(attribute=1), object()
    patch = Patch((owner, "attribute", 2))
    seen: list[Any] = []
    run: Any = own

    def current() -> Any:
        return run

    with installed([patch], current):
        other = threading.Thread(target=lambda: seen.append(patch.run))
        other.start()
        other.join(10)
        assert patch.run is own
        assert vars(owner) == {"attribute": 2}
        with installed([patch], current):
            assert patch.run is own
        with installed([patch], lambda: None):
            assert patch.run is None
        assert patch.run is own
    assert seen == [None]
    assert patch.run is None
    assert vars(owner) == {"attribute": 1}
