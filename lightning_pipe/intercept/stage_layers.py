"""Which layers a stage runs, and where what its layers stash goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_pipe.skip import SkipKey


class StageLayers(NamedTuple):
    """The layers of one stage among those of the whole sequence.

    Args:
        stage: the stage's number.
        layers: the numbers of its layers.
        names: the dotted names of all layers of the sequence.
        routes: the skip connections that leave this stage for another stage than the next, with that stage.
        stage_of: for a step of several passes, which count as stages and layers of their own one after the other: the
            stage of each layer in one pass. Otherwise empty.
    """

    stage: int
    layers: range
    names: Sequence[str]
    routes: Mapping[SkipKey, int]
    stage_of: Sequence[int] = ()

    @property
    def in_one_pass(self) -> int:
        """The number of layers in one pass."""
        return len(self.stage_of) or len(self.names)

    @property
    def all(self) -> bool:
        """Whether no other stage runs layers."""
        return len(self.layers) == len(self.names)

    @property
    def last(self) -> bool:
        """Whether no stage comes behind this one."""
        return self.layers.stop == len(self.names)

    @property
    def first_name(self) -> str:
        """The name of the first layer."""
        return self.names[self.layers.start]

    @property
    def next_name(self) -> str:
        """The name of the next stage's first layer."""
        return self.names[self.layers.stop]
