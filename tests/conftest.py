"""What all tests share."""

from __future__ import annotations

import os

# Several processes share the cores; torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gc
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

LONG = tuple(f"tests/{folder}/" for folder in ("trainer", "sharding", "faults", "recipes", "engine"))


@pytest.fixture
def float64() -> Iterator[None]:
    """Double precision by default, and the same random numbers for every test."""
    import torch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session", autouse=True)
def cache() -> Iterator[None]:
    """Profiles that are stored of modules are gone with the tests, and none of earlier ones is found.

    Processes of tests begin as copies of this one, from before the first test and with the cache.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_PIPE_CACHE"] = folder
        processes = sys.modules.get("tests.support.processes")
        if processes is not None and sys.platform == "linux":
            from tests.support.warm_up import remember_plugins

            remember_plugins()
            processes.serve_copies()
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the collector pass over what the tests import, half a million objects, now and from then on."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each module to one worker, and all modules with rehearsals to the same one.

    The processes that have the fake device import for half a minute: on every worker that rehearses anything.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scopes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            text = (config.rootpath / scope.split("::")[0]).read_text()
            return "rehearsed" if "pytest.mark.rehearsed" in text else scope

    return Scopes(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none, and rehearsals where the fake device cannot be built.

    The long modules come first: those that run last are short, and no worker waits long for another.
    """
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    _skip([item for item in items if item.get_closest_marker("gpu")], _without_cuda)
    _skip([item for item in items if item.get_closest_marker("rehearsed")], _without_rehearsal)


def _skip(items: list[pytest.Item], obstacle: Callable[[], str | None]) -> None:
    reason = obstacle() if items else None
    if reason is not None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


def _without_cuda() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device"


def _without_rehearsal() -> str | None:
    from tests.support.fake_cuda.build import obstacle

    reason = obstacle()
    if reason is not None and "REHEARSAL_REQUIRED" in os.environ:
        raise pytest.UsageError(f"The fake device cannot be built: {reason}")
    return None if reason is None else f"the fake device cannot be built: {reason}"
