"""Modules that are built without memory for their tensors, and get exactly the values of an ordinary construction."""

from lightning_pipe.construction.context import deferred_init, paused
from lightning_pipe.construction.deferred import Deferred, attributes_of, is_deferred
from lightning_pipe.construction.module import deferred_tensors, materialize

__all__ = [
    "Deferred",
    "attributes_of",
    "deferred_init",
    "deferred_tensors",
    "is_deferred",
    "materialize",
    "paused",
]
