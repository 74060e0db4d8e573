"""Checkpoints that cannot be read, for runs that resume from them."""

from __future__ import annotations

import io
from pathlib import Path

import torch


def prepare(path: Path, what: str | None) -> None:
    """Put there what a run will find."""
    whole = io.BytesIO()
    torch.save({"state_dict": {"net.0.weight": torch.zeros(32, 8)}, "loops": {}}, whole)
    if what == "truncated":
        path.write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    elif what == "empty":
        path.write_bytes(b"")
    elif what == "foreign":
        path.write_bytes(b"PK\x03\x04 this is an archive of something else" * 20)
    elif what in ("folder", "half_folder", "truncated_folder"):
        path.mkdir()
        if what == "half_folder":  # as a run leaves it that is killed before the end
            (path / "__0_0.distcp").write_bytes(b"tensors")
            torch.save({"checkpoint": {}, "values": [], "tensors": [], "like": {}}, path / "meta.pt")
        if what == "truncated_folder":
            (path / ".metadata").write_bytes(b"")
            (path / "meta.pt").write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
