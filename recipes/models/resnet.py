"""ResNet-101, of torchgpipe's benchmarks."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

BLOCKS = (3, 4, 23, 3)
EXPANSION = 4


class Bottleneck(nn.Module):
    """Three convolutions with a residual around them.

    Args:
        inputs: channels in.
        inner: channels between; there are four times as many coming out.
        stride: 2 halves the image.
    """

    def __init__(self, inputs: int, inner: int, stride: int = 1) -> None:
        super().__init__()
        outputs = inner * EXPANSION
        self.body = nn.Sequential(
            *_conv_norm(inputs, inner, 1),
            nn.ReLU(),
            *_conv_norm(inner, inner, 3, stride),
            nn.ReLU(),
            *_conv_norm(inner, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv_norm(inputs, outputs, 1, stride))

    @override
    def forward(self, image: Tensor) -> Tensor:
        return F.relu(self.body(image) + self.shortcut(image))


def resnet101(classes: int = 1000, *, blocks: tuple[int, ...] = BLOCKS, width: int = 64) -> nn.Sequential:
    """ResNet-101 as one sequence: stem, 33 blocks, head.

    Args:
        classes: number of classes.
        blocks: in each of the groups; every group but the first begins by halving the image.
        width: channels of the stem and inside the first group's blocks.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = resnet101()
        >>> sum(parameter.numel() for parameter in model.parameters())
        44549160
    """
    stem = nn.Sequential(*_conv_norm(3, width, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
    layers: list[nn.Module] = [stem]
    channels = width
    for group, count in enumerate(blocks):
        for index in range(count):
            stride = 2 if group and index == 0 else 1
            layers.append(Bottleneck(channels, width << group, stride))
            channels = (width << group) * EXPANSION
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return nn.Sequential(*layers, head)


def _conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    padding = kernel // 2
    return nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False), nn.BatchNorm2d(outputs)
