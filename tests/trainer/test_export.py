"""Divided Hugging Face models name the remedy where they are exported; it writes what one device writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import ConfigurationError
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

SMALL: dict[str, Any] = {"n_layer": 4, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 50}


class Lit(L.LightningModule):
    """A language model with tied embeddings, or without."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(**SMALL, tie_word_embeddings=tied))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class During(L.Callback):
    """Tries to export while the run is under way."""

    def __init__(self, refused: Callable[[Any], None]) -> None:
        self.refused = refused

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.refused(pl_module.model)


def export(process: int, folder: Path) -> None:
    quiet()

    def refused(model: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"trainer\.strategy\.whole_module\(\)"):
            model.save_pretrained(folder / "divided")

    for tied in (True, False):
        module = Lit(tied)
        strategy = PipeStrategy(layers="model.transformer.h", micro_batches=1, gather_limit=0)
        trainer = L.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_steps=1, callbacks=[During(refused)], **QUIET
        )
        trainer.fit(module, DataLoader(torch.arange(32).view(4, 8) % 50, batch_size=4))
        refused(module.model)
        refused(copy.deepcopy(module).model)
        trainer.save_checkpoint(folder / f"{tied}.ckpt")
        strategy.whole_module()
        if process == 0:
            module.model.save_pretrained(folder / str(tied))  # type: ignore[operator]


def test_a_divided_model_names_the_remedy(tmp_path: Path) -> None:
    run_trainers(export, 2, timeout=60, folder=tmp_path)
    assert not (tmp_path / "divided").exists()
    for tied in (True, False):
        weights = torch.load(tmp_path / f"{tied}.ckpt", weights_only=True)["state_dict"]
        found = GPT2LMHeadModel.from_pretrained(tmp_path / str(tied)).state_dict()
        assert {f"model.{key}" for key in found} == set(weights)
        assert all(torch.equal(value, weights[f"model.{key}"]) for key, value in found.items())
