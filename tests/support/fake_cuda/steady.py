"""What happens in the steady batches of a Trainer on the fake device: waits of the host, and messages by the host."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stdout
from typing import Any, NamedTuple
from unittest import mock

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy
from lightning_pipe.batches import loss_checks
from lightning_pipe.config import THOROUGH
from lightning_pipe.engine import kept_words
from lightning_pipe.transport.base import Transport
from tests.support import processes
from tests.support.trainer_runs import QUIET, quiet

WIDTH, LAYERS, SAMPLES = 32, 8, 16
ENOUGH, CHECKED = 4, frozenset([0])
"""As a run learns it in more batches: that words go without saying, and that the loss is a mean."""
LEARNING = THOROUGH + 1 + ENOUGH
"""Batches that learn: what travels, whether the loss is a mean, which tensors are samples, what goes without saying."""
BATCHES = LEARNING + 5
"""The last one learns, too."""


class Batch(NamedTuple):
    """What one process does in a steady batch.

    Args:
        waits: why and where the host waited for the device, and how often.
        messages: what the host sent and received by itself, beside the device's messages, by place.
        peak: bytes of the device at most, without what was there before the batch.
    """

    waits: dict[str, float]
    messages: dict[str, float]
    peak: int


class Model(L.LightningModule):
    """Logs several values in every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 4)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.head(self.layers(batch[0]))
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss)
        self.log("largest", logits.max(), reduce_fx="max")
        self.log("right", (logits.argmax(-1) == batch[1]).float().mean(), on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Counts(L.Callback):
    """Counts from the end of one batch to the end of the next."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.messages: Counter[str] = Counter()
        self._begin()

    def on_train_batch_end(self, *_: Any) -> None:
        from tests.support.fake_cuda.device import SEEN, native

        waits = {f"{wait.place}: {wait.why}": count for wait, count in (SEEN.waits - self._waits).items()}
        peak = native.memory()[1] - self._bytes
        self.batches.append(Batch(waits, dict(self.messages), peak))
        self._begin()

    def _begin(self) -> None:
        from tests.support.fake_cuda.device import SEEN, native

        self._waits = Counter(SEEN.waits)
        self.messages.clear()
        native.reset_peak()
        self._bytes = native.memory()[0]

    def counting(self) -> ExitStack:
        """While it is open, messages of the host are counted."""
        stack = ExitStack()
        for name, label in {"_start_send": "send", "_start_receive": "receive"}.items():
            stack.enter_context(mock.patch.object(Transport, name, self._counted(name, label)))
        return stack

    def _counted(self, name: str, label: str) -> Any:
        original = getattr(Transport, name)

        def call(*args: Any, **given: Any) -> Any:
            self.messages[f"{_place()}: {label}"] += 1
            return original(*args, **given)

        return call


def _place() -> str:
    """Who sends: the nearest room above the transports."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if "/lightning_pipe/" in file and "/transport/" not in file:
            return f"{file.rsplit('/lightning_pipe/')[-1]} {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


def steady(process: int, strategy: Mapping[str, Any], trainer: Mapping[str, Any], ranks: int) -> list[Batch]:
    """The batches between those that learn, of one process of a world whose Trainer has a device for each."""
    quiet()
    counts = Counts()
    generator = torch.Generator().manual_seed(3)
    rows = SAMPLES * BATCHES
    data = TensorDataset(torch.randn(rows, WIDTH, generator=generator), torch.randint(4, (rows,), generator=generator))
    arguments = {**QUIET, "log_every_n_steps": 1000, "max_epochs": 1, **trainer}
    soon = mock.patch.object(kept_words, "ENOUGH", ENOUGH), mock.patch.object(loss_checks, "_CHECKED", CHECKED)
    with soon[0], soon[1], counts.counting(), redirect_stdout(io.StringIO()):
        fits = L.Trainer(
            accelerator="gpu", devices=ranks, strategy=PipeStrategy(**strategy), callbacks=[counts], **arguments
        )
        fits.fit(Model(), DataLoader(data, SAMPLES, pin_memory=True))
    return counts.batches[LEARNING:-1]


def steady_world(strategy: Mapping[str, Any], trainer: Mapping[str, Any], ranks: int = 2) -> list[Batch]:
    """For each process its last batch, if the ones before were like it in waits and messages."""
    found = processes.run_trainers(steady, ranks, strategy=strategy, trainer=trainer, ranks=ranks)
    for of_process in found:
        assert all(batch[:2] == of_process[-1][:2] for batch in of_process), of_process
    return [of_process[-1] for of_process in found]
