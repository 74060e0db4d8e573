"""U-Net (B, C), of torchgpipe's benchmarks: its skip connections reach across the whole network."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from typing_extensions import override

DEPTH = 5


class UNet(nn.Module):
    """A U-Net in one sequence of layers: five times down, and as often up again.

    Args:
        convolutions: in each of the eleven cells: the B.
        channels: of the first cell, doubled on every way down: the C.
        depth: how often the image is halved.
        inputs: channels of the image.
        outputs: channels of the result.
        dropout: probability with which a channel is dropped after a convolution.

    Example:
        >>> with torch.device("meta"):
        ...     model = UNet(5, 64)
        >>> sum(parameter.numel() for parameter in model.parameters())
        232687328
    """

    def __init__(
        self,
        convolutions: int,
        channels: int,
        *,
        depth: int = DEPTH,
        inputs: int = 3,
        outputs: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = inputs
        for level in range(depth):
            here = channels << level
            layers += [*_cell(convolutions, before, here, here, dropout), nn.MaxPool2d(2)]
            before = here
        layers += _cell(convolutions, before, 2 * before, before, dropout)
        for level in reversed(range(depth)):
            here = channels << level
            # the image from below and the one from the way down, side by side
            layers += [nn.Upsample(scale_factor=2), *_cell(convolutions, 2 * here, here // 2, here // 2, dropout)]
        layers.append(nn.Conv2d(channels // 2, outputs, 1, bias=False))
        self.layers = nn.ModuleList(layers)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Maps images to images.

        Args:
            images: shape [batch, inputs, height, width], sides divisible by 2 to the power of the depth.

        Returns:
            shape [batch, outputs, height, width].
        """
        image, skips = images, []
        for layer in self.layers:
            if isinstance(layer, nn.MaxPool2d):
                skips.append(image)
            image = layer(image)
            if isinstance(layer, nn.Upsample):
                image = torch.cat([skips.pop(), image], dim=1)
        return image


def _cell(count: int, inputs: int, inner: int, outputs: int, dropout: float) -> list[nn.Module]:
    channels = [inputs, *[inner] * (count - 1), outputs]
    return [
        nn.Sequential(
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.Dropout2d(dropout),
            nn.InstanceNorm2d(after),
            nn.LeakyReLU(0.01),
        )
        for before, after in pairwise(channels)
    ]
