"""Patches of torch ask for the run of their own thread."""

from __future__ import annotations

import threading
from typing import Any

from lightning_pipe.intercept.torch_patches.patch import current_run, running


def test_a_thread_sees_its_own_run_alone() -> None:
    own: Any = object()
    inner: Any = object()
    seen: list[Any] = []
    with running(own):
        other = threading.Thread(target=lambda: seen.append(current_run()))
        other.start()
        other.join(10)
        assert current_run() is own
        with running(inner):
            assert current_run() is inner
        assert current_run() is own
    assert seen == [None]
    assert current_run() is None
