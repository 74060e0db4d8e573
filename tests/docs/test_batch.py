"""The drawing of one training batch in `docs/developing.md` is the order in which the code runs."""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any

import lightning as L
import pytest

from lightning_pipe import PipeStrategy
from tests.docs import user_code
from tests.docs.blocks import ROOT
from tests.docs.user_code import MyDataModule, MyLightningModule
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet


class Follows(L.Callback):
    """Notes the methods that the third batch calls."""

    def __init__(self) -> None:
        self.called: list[tuple[set[str], str]] = []

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (owner := frame.f_locals.get("self")) is not None:
            self.called.append(({kind.__name__ for kind in type(owner).__mro__}, frame.f_code.co_name))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            sys.setprofile(self.note)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            sys.setprofile(None)


def follow(process: int) -> list[tuple[set[str], str]]:
    quiet()
    follows = Follows()
    strategy = PipeStrategy(micro_batches=2)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, callbacks=[follows], max_epochs=1, **QUIET)
    user_code.SAMPLES = 64  # in this process
    trainer.fit(MyLightningModule(), MyDataModule())
    return follows.called


@pytest.mark.timeout(100)
def test_the_drawing_is_the_order_of_the_code() -> None:
    page = (ROOT / "docs" / "developing.md").read_text(encoding="utf-8")
    drawing = page.split("A test follows this drawing", 1)[1].split("```")[1]
    drawn = re.findall(r"^ *(\w+)\.(\w+)", drawing, re.MULTILINE)
    assert len(drawn) > 20
    called = iter(run_trainers(follow, 2, timeout=90)[0])
    found = [any(owner in kinds and method == name for kinds, name in called) for owner, method in drawn]
    missing = [f"{owner}.{method}" for (owner, method), there in zip(drawn, found, strict=True) if not there]
    assert missing == [], "the first of these is not called behind the one before it"
