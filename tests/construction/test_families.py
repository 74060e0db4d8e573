"""Models of other packages, built plain and as the ranks of a pipeline build them, are the same bit by bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from lightning_pipe.construction import deferred_init, materialize
from tests.support.built import Layers, assert_built_alike
from tests.support.fake_cuda.call import rehearse
from tests.support.networks import LitResNet
from tests.support.pairs import slow_but

W = 96
"""Weights of W x W values are large enough to be recorded."""
TEXT = {"vocab_size": 300, "hidden_size": W, "num_hidden_layers": 4, "num_attention_heads": 4}
WIDE = {**TEXT, "intermediate_size": 2 * W}
EXPERTS = {**WIDE, "num_key_value_heads": 2, "num_local_experts": 4}
SMALL = {"d_model": W, "num_heads": 4, "vocab_size": 300}
LONG = {"n_layer": 4, "n_embd": W, "n_head": 4, "vocab_size": 300, "n_positions": 64}
PICTURES = {key: value for key, value in WIDE.items() if key != "vocab_size"} | {"image_size": 32, "patch_size": 8}
BOTH_WAYS = {
    "d_model": W,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "vocab_size": 300,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": W,
    "decoder_ffn_dim": W,
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

FAMILIES: dict[str, tuple[type[Any], Any, Layers]] = {
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(**LONG), None),
    "gpt2_untied": (hf.GPT2LMHeadModel, hf.GPT2Config(**LONG, tie_word_embeddings=False), None),
    "bert": (hf.BertForPreTraining, hf.BertConfig(**WIDE), None),
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**WIDE, num_key_value_heads=2), None),
    "llama_tied": (hf.LlamaForCausalLM, hf.LlamaConfig(**WIDE, tie_word_embeddings=True), None),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**WIDE, num_key_value_heads=2, head_dim=24), None),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig(**EXPERTS), None),
    "t5": (
        hf.T5ForConditionalGeneration,
        hf.T5Config(**SMALL, d_kv=24, d_ff=2 * W, num_layers=3),
        ["encoder.block", "decoder.block"],
    ),
    "bart": (
        hf.BartForConditionalGeneration,
        hf.BartConfig(**BOTH_WAYS),
        ["model.encoder.layers", "model.decoder.layers"],
    ),
    "opt": (hf.OPTForCausalLM, hf.OPTConfig(**TEXT, ffn_dim=2 * W, word_embed_proj_dim=W), "model.decoder.layers"),
    "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**WIDE), None),
    "deberta": (hf.DebertaV2ForMaskedLM, hf.DebertaV2Config(**WIDE, relative_attention=True), None),
    "vit": (hf.ViTForImageClassification, hf.ViTConfig(**PICTURES), None),
    "whisper": (
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig(**BOTH_WAYS, max_source_positions=100, **IDS),
        ["model.encoder.layers", "model.decoder.layers"],
    ),
}


def each_family(*fast: str) -> list[Any]:
    every = [pytest.param(name, (1, 2, 4), marks=pytest.mark.slow) for name in FAMILIES]
    return [*every, *((name, (2,)) for name in fast)]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    hf.utils.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()


@pytest.mark.parametrize(("name", "ranks"), each_family("gpt2", "mixtral"))
def test_initialised(name: str, ranks: Sequence[int]) -> None:
    kind, config, layers = FAMILIES[name]
    assert_built_alike(lambda: kind(config), layers, ranks)


@pytest.mark.parametrize(("name", "ranks"), each_family("mixtral"))
def test_from_files(name: str, ranks: Sequence[int], tmp_path: Path) -> None:
    """With an index over several files; the second time in another dtype."""
    kind, config, layers = FAMILIES[name]
    torch.manual_seed(1)
    kind(config).save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_built_alike(lambda: kind.from_pretrained(tmp_path), layers, ranks)
    assert_built_alike(lambda: kind.from_pretrained(tmp_path, dtype=torch.bfloat16), layers, ranks[:1])


HEADS: dict[str, Callable[[Path], nn.Module]] = {
    "another head": hf.BertForSequenceClassification.from_pretrained,
    "none of its own": hf.BertModel.from_pretrained,
    "more labels": lambda path: hf.BertForTokenClassification.from_pretrained(path, num_labels=700),
    "another vocabulary": lambda path: hf.BertForPreTraining.from_pretrained(
        path, vocab_size=500, ignore_mismatched_sizes=True
    ),
}


@pytest.mark.parametrize("head", slow_but(HEADS, "another head", "another vocabulary"))
def test_heads_that_the_files_lack_draw_one_device_s_numbers(head: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    hf.BertForPreTraining(FAMILIES["bert"][1]).save_pretrained(tmp_path)
    assert_built_alike(lambda: HEADS[head](tmp_path), ranks=(2,))


def test_files_of_torch(tmp_path: Path) -> None:
    """The older format, with a tied weight under both of its names."""
    kind, config, layers = FAMILIES["gpt2"]
    torch.manual_seed(1)
    model = kind(config)
    config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert_built_alike(lambda: kind.from_pretrained(tmp_path, use_safetensors=False), layers, (2,))
    shutil.rmtree(tmp_path)


def test_a_residual_network() -> None:
    config = hf.ResNetConfig(embedding_size=64, hidden_sizes=[64, 128], depths=[2, 2], layer_type="basic", num_labels=3)
    layers = [layer.removeprefix("resnet.") for layer in LitResNet.layers]
    assert_built_alike(lambda: hf.ResNetForImageClassification(config), layers, (2,))


def drawn_on_two_devices() -> tuple[list[float], list[float]]:
    """Deferred and at once, on the first device while the second one is current."""
    torch.cuda.set_device(1)
    rows = []
    for around in (deferred_init, nullcontext):
        torch.cuda.manual_seed_all(3)
        torch.randn(5, device="cuda")  # the second device's generator goes on alone
        with around():
            layer = nn.Linear(100, 100, device="cuda:0")
        materialize(layer)
        rows.append(layer.weight[0, :4].tolist())
    return rows[0], rows[1]


@pytest.mark.rehearsed
def test_the_first_of_two_devices_draws_its_own_numbers() -> None:
    deferred, plain = rehearse(drawn_on_two_devices)
    assert deferred == plain
