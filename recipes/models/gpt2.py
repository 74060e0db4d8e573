"""GPT-2 as Chimera trains it: Hugging Face's model with an output matrix of its own."""

from __future__ import annotations

from transformers import GPT2Config, GPT2LMHeadModel


def gpt2(
    *,
    vocabulary: int = 50257,
    positions: int = 1024,
    width: int = 768,
    layers: int = 12,
    heads: int = 12,
    dropout: float = 0.1,
    tied: bool = True,
) -> GPT2LMHeadModel:
    """GPT-2 of any size.

    Args:
        vocabulary: number of tokens.
        positions: longest block.
        width: hidden size; the feed-forward layers are four times as wide.
        layers: number of Transformer blocks.
        heads: attention heads.
        dropout: probability of every dropout.
        tied: the output matrix is that of the embeddings.
    """
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_positions=positions,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
            tie_word_embeddings=tied,
            use_cache=False,  # of keys and values, which training never asks for again
        )
    )
    model.loss_type = "ForCausalLM"  # transformers 5 cannot tell it from GPT-2's class name, and warns
    return model


def gpt2_chimera(layers: int = 64) -> GPT2LMHeadModel:
    """GPT-2 of Chimera's Table 4: 64 blocks of width 1280; its Figures 9 and 19 use 32 blocks.

    Args:
        layers: number of Transformer blocks.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     models = [gpt2_chimera(), gpt2_chimera(layers=32)]
        >>> [sum(parameter.numel() for parameter in model.parameters()) for model in models]
        [1389327360, 759649280]
    """
    return gpt2(width=1280, layers=layers, heads=20, tied=False)
