"""Tiny models of Hugging Face, unmodified, with their own losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo.base import Module

INITIAL = 0.3
"""Spread of the initial weights of the Hugging Face models: with their 0.02 a model so small hardly reacts."""


class HuggingFace(Module):
    """An unmodified model with its own loss; ``labels`` are in the batch."""

    learning_rate = 0.05

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.model(**batch).loss


def mean_of_tokens(logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
    """The causal language model's loss without its detour over float32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def small(config: Callable[..., Any], **sizes: Any) -> Any:
    """The configuration of four small layers."""
    sizes = {"num_attention_heads": 2, "intermediate_size": 32, "initializer_range": INITIAL, **sizes}
    return config(vocab_size=40, hidden_size=16, num_hidden_layers=4, **sizes)


def gpt2() -> Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40,
        n_layer=4,
        n_embd=16,
        n_head=2,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=INITIAL,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = GPT2LMHeadModel(config)
    model.loss_function = mean_of_tokens
    return HuggingFace(model)


def bert() -> Module:
    from transformers import BertConfig, BertForPreTraining

    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return HuggingFace(BertForPreTraining(small(BertConfig, max_position_embeddings=32, **dropout)))


def llama() -> Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(small(LlamaConfig))
    model.loss_function = mean_of_tokens
    return HuggingFace(model)


def t5() -> Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=3,
        num_decoder_layers=3,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return HuggingFace(T5ForConditionalGeneration(config))
