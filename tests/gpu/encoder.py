"""The layers of the Transformer encoders that the parts run."""

from __future__ import annotations

from torch import nn


def encoder(width: int, layers: int) -> list[nn.Module]:
    """Layers of a Transformer encoder, without dropout, with heads of 16 channels.

    Args:
        width: channels.
        layers: how many.
    """
    return [
        nn.TransformerEncoderLayer(width, width // 16, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
    ]
