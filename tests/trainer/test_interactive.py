"""A pipeline from a session that has no script: ``python -i`` stands for notebooks and IPython."""

from __future__ import annotations

import subprocess
import sys

from tests.trainer.test_launcher import clean_environment

SESSION = """
import lightning_pipe, sys, torch
model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
pipeline = lightning_pipe.Pipeline(model, stages=2, micro_batches=2)
pipeline.train(lambda x: model(x).square().mean(), torch.ones(4, 2))
assert not {"lightning", "pytorch_lightning", "lightning_fabric"} & set(sys.modules)
print("trained without Lightning")

import lightning as L
assert "lightning_pipe.trainer.strategy" not in sys.modules
from tests.support.lit_modules import Data, Lit
options = dict(accelerator="cpu", logger=False, max_epochs=1, enable_checkpointing=False, enable_progress_bar=False)

L.Trainer(strategy="pipe", devices=2, **options)

trainer = L.Trainer(strategy=lightning_pipe.PipeStrategy(stages=2), devices=1, **options)
trainer.fit(Lit().double(), datamodule=Data())
print("trained on", trainer.strategy.layout.stages, "stages")
"""


def test_an_interactive_session_may_use_one_process_alone() -> None:
    """The first Trainer is refused by Lightning; the remedy for one process works.

    The session imports this package before Lightning, trains without it, and finds "pipe" all the same.
    """
    ended = subprocess.run(
        [sys.executable, "-i", "-c", "pass"],
        input=SESSION,
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
