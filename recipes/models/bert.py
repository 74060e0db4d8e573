"""BERT as Chimera trains it: Hugging Face's model with both heads and an output matrix of its own."""

from __future__ import annotations

from transformers import BertConfig, BertForPreTraining


def bert(
    *,
    vocabulary: int = 30522,
    positions: int = 512,
    width: int = 1024,
    layers: int = 24,
    heads: int = 16,
    dropout: float = 0.1,
    initial: float = 0.02,
) -> BertForPreTraining:
    """BERT with a masked language model and next sentence prediction; the output matrix is not tied to the embeddings.

    Args:
        vocabulary: number of tokens.
        positions: longest sequence.
        width: hidden size; the feed-forward layers are four times as wide.
        layers: number of Transformer blocks.
        heads: attention heads.
        dropout: probability of every dropout.
        initial: standard deviation of the weights before training; BERT's 0.02 is small for narrow models.
    """
    model = BertForPreTraining(
        BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=positions,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            initializer_range=initial,
            tie_word_embeddings=False,
            use_cache=False,  # of keys and values, which training never asks for again
        )
    )
    # transformers 5.23 leaves a second bias there that nothing reads unless the embeddings are tied
    del model.cls.predictions.bias
    return model


def bert48() -> BertForPreTraining:
    """BERT-48 of Chimera's Table 4: BERT-large with 48 blocks.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = bert48()
        >>> sum(parameter.numel() for parameter in model.parameters())
        669790012
    """
    return bert(layers=48)
