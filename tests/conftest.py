"""What all tests share."""

from __future__ import annotations

import os

# Several processes share the cores; torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gc
import tempfile
from collections.abc import Iterator

import pytest


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
    """What runs store of modules is gone with the tests, and nothing of earlier ones is found."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_PIPE_CACHE"] = folder
        yield


def pytest_collection_finish() -> None:
    """Let the collector pass over what the tests import, half a million objects, from now on."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
