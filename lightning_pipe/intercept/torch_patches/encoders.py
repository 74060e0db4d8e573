"""Lets ``nn.TransformerEncoder`` treat padding in evaluation as on one device.

There it computes on a nested tensor, and what it returns is zero where its input was padded (torch 2.10 to 2.15).
No placeholder stands for a nested tensor: here it computes on the padded one, and the zeros are put in afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def padding_alike(encoder: nn.TransformerEncoder, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of an encoder whose layers are cut, for the time of the steps."""

    def padding(
        src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None, is_causal: Any = None
    ) -> Tensor:
        kept = _kept(encoder, src, mask, src_key_padding_mask)
        norm, nested = encoder.norm, encoder.use_nested_tensor
        encoder.use_nested_tensor = False
        if kept is not None:
            encoder.norm = None  # it comes behind the zeros
        try:
            output = forward(src, mask, src_key_padding_mask, is_causal)
        finally:
            encoder.norm, encoder.use_nested_tensor = norm, nested
        if kept is None:
            return output
        output = output.masked_fill(~kept.unsqueeze(-1), 0.0)
        return output if norm is None else norm(output)

    return padding


def _kept(encoder: nn.TransformerEncoder, src: Tensor, mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """Where the input is not padded, if torch would nest it; see ``nn.TransformerEncoder.forward``."""
    first: Any = encoder.layers[0]
    nests = (
        torch.backends.mha.get_fastpath_enabled()
        and encoder.use_nested_tensor
        and not (first.training or torch.is_autocast_enabled())
        and not (torch.is_grad_enabled() and any(each.requires_grad for each in (src, *first.parameters())))
    )
    if not nests or padding is None or mask is not None or src.dim() != 3 or src.device.type not in ("cpu", "cuda"):
        return None
    kept = ~padding if padding.dtype == torch.bool else padding == 0
    falling = kept.long().cummin(1).values == kept
    return kept if not encoder.mask_check or bool(falling.all()) else None
