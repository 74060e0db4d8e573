"""Weak references of recurrent layers: those that were there come back, those that were dropped do not."""

from __future__ import annotations

from torch import nn

from lightning_pipe.construction import deferred_init, materialize


def test_references_are_as_they_were() -> None:
    with deferred_init():
        kept, dropped = nn.LSTM(100, 100), nn.LSTM(100, 100)
    dropped._flat_weight_refs = [None] * len(dropped._flat_weight_refs)
    materialize(nn.ModuleList([kept, dropped]))
    pairs = zip(kept._flat_weight_refs, kept._flat_weights, strict=True)
    assert all(reference() is weight for reference, weight in pairs)
    assert dropped._flat_weight_refs == [None] * len(dropped._flat_weights)
