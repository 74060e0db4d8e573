"""The operations inside AmoebaNet's cells. All keep to the order ReLU, convolution, batch norm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

Norm = Callable[[int], nn.Module]
Sides = int | tuple[int, int]


def batch_norm(eps: float, momentum: float) -> Norm:
    """Makes batch norms.

    Args:
        eps: added to the variance.
        momentum: share of the newest batch in the running statistics, so 0.1 is what TensorFlow calls decay 0.9.
    """
    return partial(nn.BatchNorm2d, eps=eps, momentum=momentum)


def convolution(inputs: int, outputs: int, kernel: Sides, stride: Sides = 1, groups: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the image's size at stride 1, and halves it, rounding up, at stride 2."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    return nn.Conv2d(
        inputs, outputs, (height, width), stride, padding=(height // 2, width // 2), groups=groups, bias=False
    )


def relu_conv_norm(inputs: int, outputs: int, kernel: Sides, norm: Norm, stride: Sides = 1) -> list[nn.Module]:
    """ReLU, convolution, batch norm."""
    return [nn.ReLU(), convolution(inputs, outputs, kernel, stride), norm(outputs)]


class FactorizedReduction(nn.Module):
    """Halves the image with two 1x1 convolutions at stride 2, the second one shifted by a pixel.

    Args:
        inputs: channels.
        outputs: channels; half of them from either convolution.
        norm: makes a batch norm.
    """

    def __init__(self, inputs: int, outputs: int, norm: Norm) -> None:
        super().__init__()
        self.here = convolution(inputs, outputs // 2, 1, stride=2)
        self.shifted = convolution(inputs, outputs - outputs // 2, 1, stride=2)
        self.norm = norm(outputs)

    @override
    def forward(self, image: Tensor) -> Tensor:
        image = F.relu(image)
        shifted = F.pad(image, (0, 1, 0, 1))[:, :, 1:, 1:]
        result: Tensor = self.norm(torch.cat([self.here(image), self.shifted(shifted)], dim=1))
        return result


class DropPath(nn.Module):
    """Leaves out the whole input for some samples while training, and scales up the others to make up for it.

    ``keep`` is the probability with which a sample is kept; training lowers it from 1 as it goes on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keep = 1.0

    @override
    def forward(self, image: Tensor) -> Tensor:
        if not self.training or self.keep == 1.0:
            return image
        kept = torch.rand(len(image), 1, 1, 1, device=image.device) < self.keep
        return image * kept.to(image.dtype) / self.keep


def _none(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    return nn.Identity() if stride == 1 and inputs == outputs else _one(inputs, outputs, stride, norm)


def _one(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    return nn.Sequential(*relu_conv_norm(inputs, outputs, 1, norm, stride))


def _bottleneck(kernels: tuple[tuple[int, int], ...], inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    """Convolutions with a quarter of the channels, between two 1x1 ones."""
    inner = outputs // 4
    middle: list[nn.Module] = []
    for kernel in kernels:
        # a 1x7 convolution strides along its width, a 7x1 one along its height
        steps = stride if len(kernels) == 1 else (1 if kernel[0] == 1 else stride, 1 if kernel[1] == 1 else stride)
        middle += relu_conv_norm(inner, inner, kernel, norm, steps)
    return nn.Sequential(*relu_conv_norm(inputs, inner, 1, norm), *middle, *relu_conv_norm(inner, outputs, 1, norm))


def _separable(kernel: int, inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    """Two depthwise separable convolutions, the first one with the stride."""
    parts: list[nn.Module] = []
    for channels, step in ((inputs, stride), (outputs, 1)):
        depthwise = convolution(channels, channels, kernel, step, groups=channels)
        parts += [nn.ReLU(), depthwise, convolution(channels, outputs, 1), norm(outputs)]
    return nn.Sequential(*parts)


def _max_pool(size: int, inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    # rounding up makes all operations agree on images with an odd side
    pool = nn.MaxPool2d(size, stride, padding=(size - 1) // 2, ceil_mode=size == 2)
    return _pooled(pool, inputs, outputs, norm)


def _average_pool(size: int, inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    return _pooled(nn.AvgPool2d(size, stride, padding=size // 2, count_include_pad=False), inputs, outputs, norm)


def _pooled(pool: nn.Module, inputs: int, outputs: int, norm: Norm) -> nn.Module:
    return pool if inputs == outputs else nn.Sequential(pool, convolution(inputs, outputs, 1), norm(outputs))


OPERATIONS: dict[str, Callable[[int, int, int, Norm], nn.Module]] = {
    "none": _none,
    "1x1": _one,
    "3x3": partial(_bottleneck, ((3, 3),)),
    "1x7_7x1": partial(_bottleneck, ((1, 7), (7, 1))),
    "sep3": partial(_separable, 3),
    "sep5": partial(_separable, 5),
    "max2": partial(_max_pool, 2),
    "max3": partial(_max_pool, 3),
    "avg3": partial(_average_pool, 3),
}
"""Makes an operation from channels in, channels out, stride and norm."""


class AuxiliaryHead(nn.Module):
    """A second classifier on an inner cell, for training only (as in Inception).

    Args:
        channels: of the cell's output.
        size: side of the cell's output.
        classes: number of classes.
        norm: makes a batch norm.
    """

    def __init__(self, channels: int, size: int, classes: int, norm: Norm) -> None:
        super().__init__()
        window = min(5, size)
        side = (size - window) // 3 + 1
        self.layers = nn.Sequential(
            nn.ReLU(),
            nn.AvgPool2d(window, 3),
            nn.Conv2d(channels, 128, 1, bias=False),
            norm(128),
            nn.ReLU(),
            nn.Conv2d(128, 768, side, bias=False),
            norm(768),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(768, classes),
        )

    @override
    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.layers(image)
        return logits
