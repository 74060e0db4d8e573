"""Which layers a stage runs, and where what its layers stash goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_pipe.errors import CutError
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
        heard: whether what the step returns counts: while a module is whole, all ranks run all of it and one is heard.
    """

    stage: int
    layers: range
    names: Sequence[str]
    routes: Mapping[SkipKey, int]
    stage_of: Sequence[int] = ()
    heard: bool = True

    @property
    def all(self) -> bool:
        """Whether no other stage runs layers."""
        return len(self.layers) == len(self.names)

    @property
    def last(self) -> bool:
        """Whether no stage comes behind this one."""
        return self.layers.stop == len(self.names)

    @property
    def next_name(self) -> str:
        """The name of the next stage's first layer."""
        return self.names[self.layers.stop]


class CallNumbers:
    """Numbers the calls of layers in one run of the step.

    Args:
        stage: the layers of the stage.

    Attributes:
        behind: the layer called before the current one, if that is called for the first time.
    """

    def __init__(self, stage: StageLayers) -> None:
        self._stage, self._in_one_pass = stage, len(stage.stage_of) or len(stage.names)
        self.behind, self._latest = "", ""
        self._calls: dict[int, int] = {}
        self._passes, self._at = 0, 0

    def next(self, layer: int) -> tuple[int, tuple[int, int]]:
        """The layer that is called now among those of all passes, and the key of the call's random stream.

        Raises:
            CutError: the step makes one pass too many.
        """
        stage, number = self._stage, layer
        # every call draws from a stream of its own, whichever stage makes it
        calls = self._calls.get(layer, 0)
        self._calls[layer] = calls + 1
        self.behind, self._latest = "" if calls else self._latest, stage.names[layer]
        if stage.stage_of:
            self._passes += stage.stage_of[layer] < self._at
            self._at = stage.stage_of[layer]
            number += self._passes * self._in_one_pass
        if number >= len(stage.names):
            raise CutError(
                f"layer '{stage.names[layer]}' is called in one pass more than the {self._passes} that were asked for.",
                hint="Use PipeStrategy(passes=...) with the number of passes that a training step makes.",
            )
        return number, (layer, calls)
