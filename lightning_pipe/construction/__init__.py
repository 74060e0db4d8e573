"""Modules that are built without memory for their tensors, and get exactly the values of an ordinary construction."""

from lightning_pipe.construction.context import deferred_init, paused
from lightning_pipe.construction.deferred import Deferred, attributes_of, is_deferred, memory_key
from lightning_pipe.construction.meta import initialise_meta, place_meta
from lightning_pipe.construction.module import materialize, tensors_of
from lightning_pipe.construction.stored import read_out, safetensors_file, unread, unread_tensor
from lightning_pipe.construction.unset import check_all_set

__all__ = [
    "Deferred",
    "attributes_of",
    "check_all_set",
    "deferred_init",
    "initialise_meta",
    "is_deferred",
    "materialize",
    "memory_key",
    "paused",
    "place_meta",
    "read_out",
    "safetensors_file",
    "tensors_of",
    "unread",
    "unread_tensor",
]
