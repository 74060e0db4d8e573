"""A small GPT-2 of Hugging Face on Python's own source, for the loops beside this file."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

BLOCK = 32


def small_gpt2() -> GPT2LMHeadModel:
    """Four blocks over bytes, with the same values in every process."""
    torch.manual_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=BLOCK, n_embd=32, n_layer=4, n_head=2, **off))


def texts(blocks: int = 96) -> TensorDataset:
    """Blocks of bytes."""
    read = Path(argparse.__file__).read_bytes()[: blocks * BLOCK]
    return TensorDataset(torch.tensor(list(read)).view(blocks, BLOCK))


def loss_of(model: GPT2LMHeadModel, batch: list[Tensor]) -> Tensor:
    """The loss of a batch or a micro-batch."""
    (tokens,) = batch
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss
