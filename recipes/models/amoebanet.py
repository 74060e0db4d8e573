"""AmoebaNet-B and -D, the image models of GPipe and torchgpipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.models.amoebanet_parts import (
    OPERATIONS,
    AuxiliaryHead,
    DropPath,
    FactorizedReduction,
    Norm,
    batch_norm,
)
from recipes.models.genotypes import AMOEBANET_B, AMOEBANET_D, Genotype

States = tuple[Tensor, Tensor]
Wiring = Literal["torchgpipe", "tpu"]

TPU_STEM = 32
GENOTYPES: dict[str, Genotype] = {"b": AMOEBANET_B, "d": AMOEBANET_D}


class Cell(nn.Module):
    """One cell: takes the outputs of the last two cells, and returns its own and the last one's.

    Args:
        genotype: which network's cells.
        channels: of the output of the last cell, and of the one before it.
        filters: channels of every state in the cell.
        reduction: halve the image's size.
        reduced_before: the last cell has halved it.
        norm: makes a batch norm.
        align: bring the output of the cell before the last one to this cell's size and channels; where there is no
            such cell, the TPU reference leaves that to the operations.
    """

    def __init__(
        self,
        genotype: Genotype,
        channels: tuple[int, int],
        filters: int,
        *,
        reduction: bool,
        reduced_before: bool,
        norm: Norm,
        align: bool = True,
    ) -> None:
        super().__init__()
        plan = genotype.reduction if reduction else genotype.normal
        self.sources, self.output = [step.state for step in plan.steps], plan.output
        last, before = channels
        self.squeeze = OPERATIONS["1x1"](last, filters, 1, norm)
        self.align: nn.Module = nn.Identity()
        if align and reduced_before:
            self.align = FactorizedReduction(before, filters, norm)
        elif align and before != filters:
            self.align = OPERATIONS["1x1"](before, filters, 1, norm)
        self.operations, self.drop_paths = nn.ModuleList(), nn.ModuleList()
        for step in plan.steps:
            stride = 2 if reduction and step.state < 2 else 1
            inputs = before if step.state == 1 and not align else filters
            self.operations.append(OPERATIONS[step.operation](inputs, filters, stride, norm))
            # what is passed on unchanged is never left out
            self.drop_paths.append(nn.Identity() if step.operation == "none" else DropPath())

    @override
    def forward(self, given: States) -> States:
        last, before = given
        states = [self.squeeze(last), self.align(before)]
        for first in range(0, len(self.sources), 2):
            states.append(self._operation(first, states) + self._operation(first + 1, states))
        return torch.cat([states[index] for index in self.output], dim=1), last

    def _operation(self, index: int, states: list[Tensor]) -> Tensor:
        result: Tensor = self.drop_paths[index](self.operations[index](states[self.sources[index]]))
        return result


class Stem(nn.Module):
    """The first layer: halves the image, and hands it to the first cell as both of its inputs.

    Args:
        filters: channels.
        wiring: torchgpipe's begins with a ReLU and pads the image; the TPU reference does neither.
        norm: makes a batch norm.
    """

    def __init__(self, filters: int, wiring: Wiring, norm: Norm) -> None:
        super().__init__()
        padded = wiring == "torchgpipe"
        self.layers = nn.Sequential(
            nn.ReLU() if padded else nn.Identity(),
            nn.Conv2d(3, filters, 3, stride=2, padding=int(padded), bias=False),
            norm(filters),
        )

    @override
    def forward(self, images: Tensor) -> States:
        image = self.layers(images)
        return image, image


class Classifier(nn.Module):
    """The last layer: averages every channel and weighs them.

    Args:
        channels: of the last cell's output.
        classes: number of classes.
        dropout: probability with which a channel is dropped.
    """

    def __init__(self, channels: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels, classes)
        )

    @override
    def forward(self, given: States) -> Tensor:
        logits: Tensor = self.layers(given[0])
        return logits


class AmoebaNet(nn.Module):
    """A stem, two reduction cells, three groups of normal cells with a reduction between them, and a classifier.

    ``layers`` holds all of them in order: 6 more than there are normal cells.

    Args:
        network: "b" or "d": the kinds of cells.
        layers: number of normal cells, a multiple of 3: the L of the papers' (L, D).
        filters: channels of every state in the first group of cells, doubled at every reduction: the D.
        classes: number of classes.
        wiring: ``"torchgpipe"`` or that of the TPU reference. They differ in the stem and the first two cells.
        dropout: before the classifier.
        norm_eps: added to the variance in batch norms.
        norm_momentum: share of the newest batch in their running statistics.
        auxiliary_for: side of the training images; adds a second classifier for training after the second group of
            cells, and while training the network returns both. None leaves it out.

    Example:
        >>> with torch.device("meta"):
        ...     models = [AmoebaNet("d", 18, 208), AmoebaNet("b", 18, 512, wiring="tpu")]
        >>> [sum(parameter.numel() for parameter in model.parameters()) for model in models]
        [81505540, 557277864]
    """

    def __init__(
        self,
        network: Literal["b", "d"],
        layers: int,
        filters: int,
        classes: int = 1000,
        *,
        wiring: Wiring = "torchgpipe",
        dropout: float = 0.5,
        norm_eps: float = 1e-5,
        norm_momentum: float = 0.1,
        auxiliary_for: int | None = None,
    ) -> None:
        super().__init__()
        if layers < 3 or layers % 3 or filters % 16:
            raise ValueError(
                f"AmoebaNet takes a multiple of 3 normal cells and a multiple of 16 filters; got layers={layers}, "
                f"filters={filters}."
            )
        genotype = GENOTYPES[network]
        norm = batch_norm(norm_eps, norm_momentum)
        stem = filters // 4 if wiring == "torchgpipe" else TPU_STEM
        self.layers = nn.ModuleList([Stem(stem, wiring, norm)])
        before, last, reduced = stem, stem, False
        for width, reduction in _plan(layers, filters, wiring):
            cell = Cell(
                genotype,
                (last, before),
                width,
                reduction=reduction,
                reduced_before=reduced,
                norm=norm,
                align=wiring == "torchgpipe" or len(self.layers) > 1,
            )
            self.layers.append(cell)
            before, last, reduced = last, width * len(cell.output), reduction
        self.layers.append(Classifier(last, classes, dropout))
        self.auxiliary_head: AuxiliaryHead | None = None
        self.auxiliary_after = len(self.layers) - 3 - layers // 3  # the last cell before the last reduction
        if auxiliary_for is not None:
            channels = 2 * filters * len(genotype.normal.output)
            side = _side(auxiliary_for, wiring)
            self.auxiliary_head = AuxiliaryHead(channels, side, classes, norm)

    @override
    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Classifies images.

        Args:
            images: shape [batch, 3, height, width].

        Returns:
            logits of shape [batch, classes]; while training with an auxiliary head a pair of them.
        """
        state: States | Tensor = images
        auxiliary: Tensor | None = None
        for index, layer in enumerate(self.layers):
            state = layer(state)
            if index == self.auxiliary_after and self.training and self.auxiliary_head is not None:
                auxiliary = self.auxiliary_head(state[0])
        assert isinstance(state, Tensor)
        return state if auxiliary is None else (state, auxiliary)


def _plan(layers: int, filters: int, wiring: Wiring) -> Iterator[tuple[int, bool]]:
    """For each cell its filters, and whether it halves the image."""
    first = filters // 2 if wiring == "torchgpipe" else filters // 4
    yield first, True
    yield 2 * first, True
    for group in range(3):
        if group:
            yield filters << group, True
        for _ in range(layers // 3):
            yield filters << group, False


def _side(image: int, wiring: Wiring) -> int:
    """Side of the image where the auxiliary head stands: halved by the stem and three reductions."""
    side = (image + 1) // 2 if wiring == "torchgpipe" else (image - 1) // 2
    for _ in range(3):
        side = (side + 1) // 2
    return side
