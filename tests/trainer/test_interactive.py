"""A pipeline from a session that has no script: Python's own console stands for notebooks and IPython."""

from __future__ import annotations

import code
import os
import sys

import pytest

from tests.support.pairs import slow_but
from tests.support.processes import outcomes
from tests.trainer.test_launcher import VARIABLES

SESSION = """
import lightning_pipe, sys, torch
layers = lambda: torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
model = layers()
pipeline = lightning_pipe.Pipeline(model, stages=2, micro_batches=2)
pipeline.train(lambda x: model(x).square().mean(), torch.ones(4, 2))
assert not {{"lightning", "pytorch_lightning", "lightning_fabric"}} & set(sys.modules)
print("trained without Lightning")

import {package} as L
assert "lightning_pipe.trainer.strategy" not in sys.modules
options = dict(accelerator="cpu", logger=False, max_epochs=1, enable_checkpointing=False, enable_progress_bar=False)

L.Trainer(strategy="pipe", devices=2, **options)

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = layers()
    def training_step(self, batch, batch_idx):
        return self.model(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = L.Trainer(strategy=lightning_pipe.PipeStrategy(stages=2), devices=1, **options)
trainer.fit(Lit(), torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4))
print("trained on", trainer.strategy.layout.stages, "stages")

assert type(L.Trainer(strategy="pipe", devices=1, **options).strategy) is lightning_pipe.PipeStrategy
assert isinstance(trainer.strategy, sys.modules["{strategies}"].ParallelStrategy)
assert issubclass(lightning_pipe.PipelineTimeline, L.Callback)
assert "{other}" not in sys.modules
"""
PACKAGES = {
    "lightning": {"strategies": "lightning.pytorch.strategies", "other": "pytorch_lightning"},
    "pytorch_lightning": {"strategies": "pytorch_lightning.strategies", "other": "lightning.pytorch"},
}
PURGED = ("lightning_pipe", "lightning", "lightning_fabric", "pytorch_lightning")


def type_into(process: int, session: str) -> None:
    """In a copy of this process, which forgets this package and Lightning, but not torch: its import takes long."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in PURGED:
            del sys.modules[name]
    sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__.partition(".")[0] not in PURGED]
    for name in (*VARIABLES, "RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    sys.ps1 = ">>> "
    console = code.InteractiveConsole()
    for line in session.splitlines():
        console.push(line)


@pytest.mark.parametrize("package", slow_but(PACKAGES, "pytorch_lightning"))
def test_an_interactive_session_may_use_one_process_alone(package: str) -> None:
    """The first Trainer is refused by Lightning; the remedy for one process works.

    The session imports this package before Lightning, trains without it, and finds "pipe" all the same. It has one of
    the two packages: neither imports the other.
    """
    pytest.importorskip(package, reason="`make` sets up an environment with it")
    session = SESSION.format(package=package, **PACKAGES[package])
    (ended,) = outcomes(type_into, 1, group_timeout=None, session=session)
    assert ended.error is None, ended.trace
    printed = ended.output
    assert "AssertionError" not in printed, printed
    assert "trained without Lightning" in printed, printed
    assert "is not compatible with an interactive environment. Run your code as a script" in printed, printed
    assert "trained on 2 stages" in printed, printed
