"""Peak host memory of each process over the life of a large GPT-2: the first step, saving and resuming."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_pipe import PipeStrategy
from tests.benchmarks.construction import LENGTH, MB, Lit, peak, reset
from tests.benchmarks.measure import Finding
from tests.support import processes
from tests.support.trainer_runs import QUIET, quiet

ALLOWED = 300 * MB
PHASES = ("first step", "saving", "resuming")


Phase = tuple[int, int, int]
"""The peak, and the process's own memory and that of mapped files at the end."""


class Peaks(L.Callback):
    """The peak of each phase above a process without a model.

    Args:
        base: bytes of the process without one.
    """

    def __init__(self, base: int) -> None:
        self.base, self.share = base, 0
        self.found: dict[str, Phase] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what happens inside."""
        reset()
        yield
        self.note(name)

    def note(self, name: str) -> None:
        """The peak since it was last forgotten, and what of the memory is the process's own and what mapped files."""
        kinds = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in status() if line.startswith("Rss")}
        self.found[name] = (peak() - self.base, kinds["RssAnon"], kinds["RssFile"] + kinds["RssShmem"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.note("start")
        reset()

    def on_train_batch_end(self, trainer: Any, pl_module: L.LightningModule, *_: Any) -> None:
        self.note("first step")
        self.share = sum(parameter.nbytes for _, parameter in trainer.strategy.pipeline.local_parameters())


def status() -> list[str]:
    """Lines about this process."""
    return Path("/proc/self/status").read_text().splitlines()


def run(quick: bool) -> list[Finding]:
    """On one, two and four ranks, with about 1.5 GB of weights."""
    size = {"layers": 4, "width": 512} if quick else {"layers": 26, "width": 1024}
    with torch.device("meta"):
        whole = sum(parameter.nbytes for parameter in Lit(**size).parameters())
    found = []
    for devices in (1, 2, 4):
        folder = Path(tempfile.mkdtemp(prefix="lightning-pipe-memory-"))
        try:
            runs = [
                processes.run_trainers(
                    step, devices, timeout=500, devices=devices, folder=folder, resume=resume, **size
                )
                for resume in (False, True)
            ]
        finally:
            shutil.rmtree(folder)
        for rank, ((phases, share), (resumed, _)) in enumerate(zip(*runs, strict=True)):
            found += list(findings(devices, rank, {**phases, "resuming": resumed["start"]}, share, whole))
    return found


def findings(devices: int, rank: int, phases: dict[str, Phase], share: int, whole: int) -> Iterator[Finding]:
    """The rows of one rank. The one that saves has all weights, and the bytes of the file."""
    limit = 2 * whole + ALLOWED
    for phase in PHASES:
        most, anonymous, mapped = phases[phase]
        target = phase == "saving" and rank == 0 and devices > 1
        yield Finding(
            f"{devices} ranks, rank {rank}, {phase}: peak for {share / MB:.0f} MB held",
            f"{most / MB:.0f} MB (then {anonymous / MB:.0f} own, {mapped / MB:.0f} mapped)",
            f"at most {limit / MB:.0f} MB" if target else "",
            most <= limit if target else None,
        )


def step(process: int, devices: int, folder: Path, resume: bool, **size: Any) -> tuple[dict[str, Phase], int]:
    """Train one step without momentum, save and export; or resume."""
    quiet()
    warnings.filterwarnings("ignore")
    Lit(1, 64)  # what the libraries import and allocate only now
    torch.manual_seed(1)
    peaks = Peaks(reset())
    strategy = PipeStrategy(micro_batches=2, layers="model.transformer.h", gather_limit=0)
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=2 if resume else 1, callbacks=[peaks], **QUIET
    )
    with trainer.init_module():
        module = Lit(**size)
    path = folder / "saved.ckpt"
    data = DataLoader(torch.zeros(8, LENGTH, dtype=torch.int64), batch_size=4)
    trainer.fit(module, data, ckpt_path=path if resume else None)
    if not resume:
        module.zero_grad()
        with peaks.phase("saving"):
            trainer.save_checkpoint(path)
    return peaks.found, peaks.share
