"""The GPT-2 recipe on one device: its perplexity, its weight decay, its checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch

from recipes.callbacks import Curve, Throughput
from recipes.data.text import TextBlocks
from recipes.learning_rate_schedules import warmup_cosine
from recipes.modules.gpt2 import GPT2
from recipes.modules.language import Perplexity
from recipes.optimizers import decay_groups
from tests.recipes.conftest import write_text
from tests.support.oracle import SILENT


def small_gpt2() -> GPT2:
    module = GPT2(vocabulary=300, positions=16, width=32, layers=2, heads=2, dropout=0.0)
    module.make_optimizer, module.make_scheduler = partial(torch.optim.AdamW, lr=1e-2), warmup_cosine
    return module


def test_perplexity_is_the_exponential_of_the_mean_loss_per_sample() -> None:
    perplexity = Perplexity()
    perplexity.update(torch.tensor(1.0), weight=3)
    perplexity.update(torch.tensor(2.0), weight=1)
    assert perplexity.compute() == pytest.approx(torch.tensor(1.25).exp())


def test_weight_decay_spares_vectors() -> None:
    model = small_gpt2()
    decayed, spared = decay_groups(model, 0.1)
    assert {parameter.dim() for parameter in decayed["params"]} == {2}
    assert {parameter.dim() for parameter in spared["params"]} == {1}
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))


def test_it_learns_on_one_device_and_its_checkpoint_loads_alone(tmp_path: Path) -> None:
    L.seed_everything(0)
    data = TextBlocks(
        files=str(write_text(tmp_path / "wiki")),
        vocabulary=300,
        block_length=16,
        batch_size=8,
        cache=str(tmp_path / "c"),
    )
    model, throughput, curve = small_gpt2(), Throughput(), Curve(str(tmp_path / "pictures" / "curve.png"))
    trainer = L.Trainer(
        max_steps=40,
        accelerator="cpu",
        callbacks=[throughput, curve],
        log_every_n_steps=10,
        **SILENT,
        gradient_clip_val=1.0,
        inference_mode=False,
    )
    before = trainer.validate(model, data, verbose=False)[0]
    trainer.fit(model, data)
    after = trainer.validate(model, data, verbose=False)[0]
    assert before["val_perplexity"] > 200
    assert after["val_perplexity"] < before["val_perplexity"] / 4
    assert after["val_perplexity"] == pytest.approx(torch.tensor(after["val_loss"]).exp().item(), rel=1e-4)
    assert throughput.samples == (40 - throughput.warm_up) * 8
    assert throughput.samples_per_second is not None
    assert [step for step, _ in curve.points["train_loss"]] == [10, 20, 30, 40]
    assert curve.points["val_perplexity"][0] == (0, pytest.approx(before["val_perplexity"]))
    assert curve.points["val_perplexity"][-1] == (40, pytest.approx(after["val_perplexity"]))
    losses, others = curve.draw().axes
    assert [line.get_label() for line in losses.lines] == ["validation loss", "training loss"]
    assert [line.get_label() for line in others.lines] == ["validation perplexity"]
    assert curve.path.stat().st_size > 1000

    trainer.save_checkpoint(tmp_path / "gpt2.ckpt")
    again = GPT2.load_from_checkpoint(tmp_path / "gpt2.ckpt", weights_only=True)
    batch = next(iter(data.val_dataloader()))
    with torch.no_grad():
        assert torch.equal(again.eval().model(**batch).loss, model.eval().model(**batch).loss)
    with pytest.raises(TypeError, match="has no make_optimizer"):
        again.configure_optimizers()
