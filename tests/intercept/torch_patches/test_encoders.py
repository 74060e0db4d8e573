"""An encoder that is cut treats padding as torch does on one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_pipe.intercept.torch_patches.encoders import padding_alike


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_padding_alike(norm: bool, training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8) if norm else None).train(training)
    src, padding = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    if norm:
        nn.init.ones_(encoder.norm.bias)  # so that what is padded is not zero behind it
    before = encoder.norm, encoder.use_nested_tensor
    with torch.no_grad():
        expected = encoder(src, src_key_padding_mask=padding)
        found = padding_alike(encoder, encoder.forward)(src, src_key_padding_mask=padding)
    torch.testing.assert_close(found, expected)
    assert (encoder.norm, encoder.use_nested_tensor) == before
    assert bool((expected[1, 2:] == (1.0 if norm else 0.0)).all()) is not training
