"""Skip connections that layers declare go straight from the stage that stashes to the one that pops."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_pipe.engine.skip_routes import Routes, skip_routes
from lightning_pipe.skip import SkipKey, skippable


class Layer(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


def layer(*, stash: list[str] | None = None, pop: list[str] | None = None) -> nn.Module:
    made: nn.Module = skippable(stash=stash or [], pop=pop or [])(Layer)() if stash or pop else Layer()
    return made


def routes(*layers: nn.Module, extra: nn.Module | None = None) -> Routes:
    module = nn.Sequential(*layers)
    named = list(module.named_children())
    if extra is not None:
        module.add_module("extra", extra)
    return skip_routes(module, named, [range(n, n + 1) for n in range(len(layers))])


def test_a_layer_that_pops_and_stashes_a_name_pops_first() -> None:
    both = layer(stash=["x"], pop=["x"])
    found = routes(layer(stash=["x"]), layer(), both, layer(), layer(pop=["x"]), extra=layer(pop=["y"]))
    assert found == {0: {SkipKey(None, "x"): 2}, 2: {SkipKey(None, "x"): 4}}
