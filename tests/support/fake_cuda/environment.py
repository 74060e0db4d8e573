"""Processes that have the fake device: variables of their environment say so, and `install` does it."""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path

from tests.support.fake_cuda import build

ROOT = Path(__file__).parents[3]
DEVICES, PROTECTS, RECORD = "FAKE_CUDA_DEVICES", "FAKE_CUDA_PROTECTS", "FAKE_CUDA_RECORD"


def environment(devices: int = 1, *, protects: bool = False, record: Path | None = None) -> dict[str, str]:
    """The environment of a process with devices, and of all that it starts.

    Args:
        devices: how many.
        protects: whether code of the host that touches device memory ends the process.
        record: a folder where each process notes at its end what was hazardous.
    """
    build.built()
    site = Path(__file__).parent / "site"
    own = {DEVICES: str(devices), "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    if protects:
        own[PROTECTS] = "1"
    if record is not None:
        own[RECORD] = str(record)
    return {**os.environ, **own}


def install() -> None:
    """Give this process its devices; called before anything else runs."""
    from tests.support.fake_cuda import device, gloo, nccl

    device.install(int(os.environ[DEVICES]), protects=PROTECTS in os.environ)
    gloo.install()
    nccl.install()
    if RECORD in os.environ:
        atexit.register(note_hazards)


def note_hazards() -> None:
    """Write down what was hazardous in this process, for who has started it."""
    from tests.support.fake_cuda.device import SEEN

    if SEEN.hazards:
        (Path(os.environ[RECORD]) / f"{os.getpid()}.json").write_text(json.dumps(SEEN.hazards))
        SEEN.hazards.clear()


def hazards(folder: Path) -> list[str]:
    """What the processes of a rehearsal have noted since this was asked last."""
    found: list[str] = []
    for file in sorted(folder.glob("*.json")):
        found += json.loads(file.read_text())
        file.unlink()
    return found
