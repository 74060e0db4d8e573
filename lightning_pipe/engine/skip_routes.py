"""The routes of skip connections over the stages: straight from the one that stashes to the one that pops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from lightning_pipe.skip import SkipEvent, SkipKey, SkippableMixin, verify


class SkipRoutes:
    """The skip connections that pass over at least one stage.

    Those that layers declare are known from the start. What layers stash and pop by the plain functions shows when they
    run: until then, and where they do not always pop at the same stage, it goes from stage to stage like other tensors.

    Args:
        module: the user's module.
        layers: the layer sequence with dotted names.
        stage_layers: for each stage its range of layers.

    Raises:
        SkipError: what the layers declare does not fit together.

    Attributes:
        by_stage: for each stage what leaves it for another than the next, with the stage it goes to.
        ends: the pairs of stages that they connect, sorted.
    """

    def __init__(
        self, module: nn.Module, layers: Sequence[tuple[str, nn.Module]], stage_layers: Sequence[range]
    ) -> None:
        parts = [
            (number, f"{name}.{inner}".rstrip("."), part)
            for number, (name, layer) in enumerate(layers)
            for inner, part in layer.named_modules()
            if isinstance(part, SkippableMixin)
        ]
        # With skippable parts outside the layers the declarations of the layers alone need not fit together.
        if len(parts) == sum(isinstance(part, SkippableMixin) for part in module.modules()):
            verify((name, part) for _, name, part in parts)
        stage_of = {number: stage for stage, span in enumerate(stage_layers) for number in span}
        declared: dict[int, list[SkipEvent]] = defaultdict(list)
        for number, _, part in parts:
            # A layer that pops and stashes the same name pops first.
            declared[stage_of[number]] += [SkipEvent(key, stashes=False) for key in part.skip_keys(part.poppable)]
            declared[stage_of[number]] += [SkipEvent(key, stashes=True) for key in part.skip_keys(part.stashable)]
        self._connections: set[tuple[SkipKey, int, int]] = set()
        self.by_stage: dict[int, dict[SkipKey, int]] = {}
        self.ends: list[tuple[int, int]] = []
        self.learn(declared)

    def learn(self, events: Mapping[int, Iterable[SkipEvent]]) -> bool:
        """Take up what has been stashed and popped; returns whether that changes the routes.

        Args:
            events: by stage, in order.
        """
        self._connections.update(_connections(events))
        later: dict[tuple[int, SkipKey], set[int]] = defaultdict(set)
        for key, early, late in self._connections:
            later[early, key].add(late)
        before, self.by_stage = self.by_stage, {}
        for (early, key), stages in later.items():
            # Two receivers would mean two messages, and two gradients to add: it goes from stage to stage then.
            if len(stages) == 1 and max(stages) > early + 1:
                self.by_stage.setdefault(early, {})[key] = max(stages)
        self.ends = sorted({(early, late) for early, keys in self.by_stage.items() for late in keys.values()})
        return self.by_stage != before


def _connections(events: Mapping[int, Iterable[SkipEvent]]) -> Iterator[tuple[SkipKey, int, int]]:
    """What is stashed, with the stages that stash and pop it."""
    stashed: dict[SkipKey, int] = {}
    for stage in sorted(events):
        for event in events[stage]:
            if event.stashes:
                stashed[event.key] = stage
            elif event.key in stashed:
                yield event.key, stashed.pop(event.key), stage
