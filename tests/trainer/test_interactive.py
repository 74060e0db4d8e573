"""A pipeline from a session that has no script: ``python -i`` stands for notebooks and IPython."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.pairs import slow_but
from tests.trainer.test_launcher import clean_environment

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


@pytest.mark.parametrize("package", slow_but(PACKAGES, "pytorch_lightning"))
def test_an_interactive_session_may_use_one_process_alone(package: str) -> None:
    """The first Trainer is refused by Lightning; the remedy for one process works.

    The session imports this package before Lightning, trains without it, and finds "pipe" all the same. It has one of
    the two packages: neither imports the other.
    """
    pytest.importorskip(package, reason="`make` sets up an environment with it")
    ended = subprocess.run(
        [sys.executable, "-i", "-c", "pass"],
        input=SESSION.format(package=package, **PACKAGES[package]),
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "AssertionError" not in ended.stderr, ended.stderr
    assert "trained without Lightning" in ended.stdout, ended.stderr
    assert "is not compatible with an interactive environment. Run your code as a script" in ended.stderr, ended.stderr
    assert "trained on 2 stages" in ended.stdout, ended.stderr
