"""The routes of skip connections over the stages: straight from the one that stashes to the one that pops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from lightning_pipe.skip import SkipKey, SkippableMixin, verify

Routes = Mapping[int, Mapping[SkipKey, int]]
"""For each stage what leaves it for another than the next, with the stage that it goes to."""


def skip_routes(
    module: nn.Module, layers: Sequence[tuple[str, nn.Module]], stage_layers: Sequence[range]
) -> dict[int, dict[SkipKey, int]]:
    """The routes of the skip connections that layers declare and that pass over at least one stage.

    What layers stash and pop by the plain functions goes from stage to stage like other tensors.

    Args:
        module: the user's module.
        layers: the layer sequence with dotted names.
        stage_layers: for each stage its range of layers.

    Raises:
        SkipError: what the layers declare does not fit together.
    """
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
    stashed: dict[SkipKey, int] = {}
    routes: dict[int, dict[SkipKey, int]] = {}
    for number, _, part in parts:
        stage = stage_of[number]
        # A layer that pops and stashes the same name pops first.
        for key in part.skip_keys(part.poppable):
            if (early := stashed.pop(key, stage)) < stage - 1:
                routes.setdefault(early, {})[key] = stage
        stashed.update(dict.fromkeys(part.skip_keys(part.stashable), stage))
    return routes


def ends_of(routes: Routes) -> list[tuple[int, int]]:
    """The pairs of stages that routes connect, sorted."""
    return sorted({(early, late) for early, keys in routes.items() for late in keys.values()})
