"""What the recipes' steps compute, on small batches made by hand or from small real texts."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from recipes.data.segment_pairs import IGNORED
from recipes.data.translation import collated
from recipes.errors import RecipeError
from recipes.models.amoebanet_parts import DropPath
from recipes.modules.amoebanet import AmoebaNetClassifier
from recipes.modules.bert import BERT
from recipes.modules.gpipe_transformer import TransformerLM
from recipes.modules.nmt import Translator
from recipes.modules.unet import Denoiser
from tests.recipes.data.test_translation import data_module
from tests.support.oracle import SILENT


def halves(batch: dict[str, Tensor], first: int) -> list[dict[str, Tensor]]:
    return [{name: value[part] for name, value in batch.items()} for part in (slice(first), slice(first, None))]


def loss_of(module: L.LightningModule, batch: dict[str, Tensor]) -> float:
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return float(module.training_step(batch, 0).detach())


def assert_divisible(module: L.LightningModule, batch: dict[str, Tensor]) -> None:
    """The mean over samples of the parts' losses is the whole batch's, however it is divided."""
    size = len(next(iter(batch.values())))
    first, second = (loss_of(module, part) for part in halves(batch, 2))
    assert (2 * first + (size - 2) * second) / size == pytest.approx(loss_of(module, batch), rel=1e-5)


# ------------------------------------------------------------------ AmoebaNet


def amoebanet(**settings: Any) -> AmoebaNetClassifier:
    torch.manual_seed(0)
    return AmoebaNetClassifier(
        **{
            "network": "d",
            "layers": 3,
            "filters": 16,
            "classes": 10,
            "image_size": 32,
            "dropout": 0.0,
            "drop_path": 0.0,
        }
        | settings
    )


def test_a_transfer_takes_everything_but_the_head(tmp_path: Path) -> None:
    given = amoebanet(classes=6)
    for parameter in given.parameters():
        parameter.data += 1  # both begin with the same seed
    samples: Any = [{"image": torch.randn(3, 48, 48), "label": label} for label in range(4)]
    loader = DataLoader(samples, batch_size=4)
    quiet: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    trainer = L.Trainer(**quiet, enable_model_summary=False)
    trainer.strategy.connect(given)
    trainer.save_checkpoint(tmp_path / "six.ckpt", weights_only=True)
    strict = amoebanet(classes=4, image_size=48)
    with pytest.raises(RuntimeError, match="size mismatch"):
        L.Trainer(**quiet).validate(strict, loader, ckpt_path=str(tmp_path / "six.ckpt"), verbose=False)
    other = amoebanet(classes=4, image_size=48)
    fresh = {name: value.clone() for name, value in other.state_dict().items()}
    other.strict_loading = False
    L.Trainer(**quiet).validate(other, loader, ckpt_path=str(tmp_path / "six.ckpt"), verbose=False)
    for name, value in other.state_dict().items():
        anew = name.startswith(other.head)
        assert torch.equal(value, fresh[name] if anew else given.state_dict()[name]), name
    assert any(name.startswith("model.auxiliary_head.") for name in fresh)
    other._trainer = SimpleNamespace(datamodule=L.LightningDataModule())  # type: ignore[assignment]
    checkpoint = {"state_dict": given.state_dict(), "LightningDataModule": {"batches": 3}}
    other.on_load_checkpoint(checkpoint)
    assert checkpoint.keys() == {"state_dict"}, "where the other run was in its data"
    saved = torch.load(tmp_path / "six.ckpt")
    saved["state_dict"] = {f"net.{name}": value for name, value in saved["state_dict"].items()}
    torch.save(saved, tmp_path / "renamed.ckpt")
    with pytest.raises(RecipeError, match=r"lacks \d+ of the \d+ parameters .* such as model\."):
        L.Trainer(**quiet).validate(other, loader, ckpt_path=str(tmp_path / "renamed.ckpt"), verbose=False)


def images(count: int = 4) -> dict[str, Tensor]:
    return {"image": torch.rand(count, 3, 32, 32), "label": torch.arange(count)}


def test_the_loss_is_smoothed_and_has_the_auxiliary_head_s() -> None:
    module, batch = amoebanet(norm_momentum=0.0), images()
    logits, auxiliary = module.model(batch["image"])
    main, other = (F.cross_entropy(one, batch["label"], label_smoothing=0.1) for one in (logits, auxiliary))
    assert loss_of(module, batch) == pytest.approx(float((main + 0.4 * other).detach()), rel=1e-5)
    assert amoebanet(auxiliary_weight=0.0).model.auxiliary_head is None


def test_paths_are_dropped_more_often_as_training_goes_on() -> None:
    module = amoebanet(drop_path=0.3)
    module._trainer = SimpleNamespace(global_step=50, estimated_stepping_batches=100)  # type: ignore[assignment]
    module.on_train_batch_start(None, 0)
    assert {part.keep for part in module.modules() if isinstance(part, DropPath)} == {0.85}


@pytest.mark.parametrize("network", ["b", "d"])
def test_weight_decay_is_on_convolutions_and_matrices(network: str) -> None:
    module = amoebanet(network=network)
    module.make_optimizer = partial(torch.optim.SGD, lr=1.0)
    decayed, spared = module.configure_optimizers().param_groups
    assert decayed["weight_decay"] == 4e-5
    assert {parameter.dim() for parameter in decayed["params"]} == {2, 4}
    assert {parameter.dim() for parameter in spared["params"]} == {1}


def test_top_1_and_top_5() -> None:
    module = amoebanet()
    logits = torch.eye(10)[torch.tensor([0, 1, 2, 3])] * 5 + torch.arange(10) * -0.1
    for metric in (module.val_top1, module.val_top5):
        metric.update(logits, torch.tensor([0, 1, 9, 4]))
    assert module.val_top1.compute() == 0.5
    assert module.val_top5.compute() == 0.75


# ------------------------------------------------------------------ U-Net, GPipe's Transformer


def test_the_denoiser_compares_with_the_brightness_of_the_clean_image() -> None:
    torch.manual_seed(0)
    module = Denoiser(convolutions=1, channels=8, depth=2)
    clean = torch.rand(4, 3, 16, 16)
    batch = {"image": clean, "noisy": clean + torch.randn(4, 3, 16, 16), "label": torch.arange(4)}
    restored = module.model(batch["noisy"]).detach()
    assert loss_of(module, batch) == pytest.approx(float(((restored - clean.mean(1, keepdim=True)) ** 2).mean()))
    assert_divisible(module, batch)
    module.validation_step(batch, 0)
    assert module.val_psnr.compute() == pytest.approx(10 * math.log10(2**2 / loss_of(module, batch)), rel=1e-5)


def test_the_transformer_predicts_every_next_token() -> None:
    torch.manual_seed(0)
    module = TransformerLM(layers=1, vocabulary=20, positions=6, width=8, inner=16, heads=2, dropout=0.0)
    tokens = torch.randint(20, (3, 6))
    batch = {"input_ids": tokens, "labels": tokens}
    chances = module.model(tokens).log_softmax(-1)
    expected = [-chances[row, place, tokens[row, place + 1]].item() for row in range(3) for place in range(5)]
    assert loss_of(module, batch) == pytest.approx(sum(expected) / 15, rel=1e-5)


# ------------------------------------------------------------------ BERT


def bert(**settings: Any) -> BERT:
    torch.manual_seed(0)
    sizes = {"vocabulary": 50, "positions": 12, "width": 16, "layers": 2, "heads": 2, "dropout": 0.0}
    return BERT(**sizes | settings)


def pairs(count: int = 5, length: int = 12) -> dict[str, Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(4, 50, (count, length))
    labels = torch.full((count, length), IGNORED)
    for row in range(count):
        labels[row, 1 : 2 + row] = tokens[row, 1 : 2 + row]
    attention = torch.ones_like(tokens)
    attention[0, 8:] = 0
    return {
        "input_ids": tokens,
        "token_type_ids": torch.zeros_like(tokens),
        "attention_mask": attention,
        "labels": labels,
        "next_sentence_label": torch.arange(count) % 2,
    }


def test_bert_s_loss_is_the_same_however_a_batch_is_divided() -> None:
    assert_divisible(bert(), pairs())


def test_bert_s_loss_is_that_of_hugging_face_for_one_pair() -> None:
    module, batch = bert(), pairs(1)
    assert loss_of(module, batch) == pytest.approx(float(module.model(**batch).loss), rel=1e-5)


# ------------------------------------------------------------------ translation


def translator(**settings: Any) -> Translator:
    torch.manual_seed(0)
    sizes = {"layers": 2, "inner": 32, "heads": 2, "vocabulary": 50, "width": 16, "head_size": 8, "dropout": 0.0}
    return Translator(**sizes | settings)


def sentences() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return collated(
        [{"source": torch.randint(3, 50, (n,)), "target": torch.randint(3, 50, (6 - n,))} for n in (1, 2, 3, 4, 5)],
        pad=0,
        begin=1,
    )


def test_the_translator_s_loss_is_the_same_however_a_batch_is_divided() -> None:
    assert_divisible(translator(), sentences())


def test_the_translator_s_loss_is_that_per_token() -> None:
    module, batch = translator(), sentences()
    logits = module.logits(batch)
    expected = F.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=0, label_smoothing=0.1)
    assert loss_of(module, batch) == pytest.approx(float(expected), rel=1e-5)


def test_translations_end_and_are_the_likeliest_tokens() -> None:
    module, batch = translator().eval(), sentences()
    translated = module.translate(batch["source"], batch["mask"], begin=1, end=2, longest=6)
    assert translated.shape[1] <= 6
    begun = torch.cat([torch.ones(5, 1, dtype=torch.long), translated], dim=1)
    with torch.no_grad():
        again = module.model(batch["source"], begun, batch["mask"])[:, :-1].argmax(-1)
    assert torch.equal(again, translated)


def test_it_learns_to_translate_and_bleu_tells(tmp_path: Path) -> None:
    L.seed_everything(0)
    data = data_module(tmp_path, batch_size=8)
    module = translator(vocabulary=300, positions=16, label_smoothing=0.0)
    module.make_optimizer = partial(torch.optim.Adam, lr=1e-2)
    trainer = L.Trainer(
        max_epochs=12,
        accelerator="cpu",
        **SILENT,
        num_sanity_val_steps=0,
    )
    before = trainer.validate(module, data, verbose=False)[0]
    trainer.fit(module, data)
    after = trainer.validate(module, data, verbose=False)[0]
    assert after["val_loss"] < before["val_loss"] / 4
    assert after["val_token_accuracy"] > 0.8
    assert module.translate(torch.tensor([[0]]), torch.tensor([[True]]), 1, 2, 4).shape[1] <= 4
    result = trainer.test(module, data, verbose=False)[0]
    assert 0 <= result["test_bleu"] <= 1
