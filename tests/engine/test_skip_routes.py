"""Skip connections go straight from the stage that stashes to the one that pops."""

from __future__ import annotations

from torch import nn

from lightning_pipe.engine.skip_routes import SkipRoutes
from lightning_pipe.skip import SkipEvent, SkipKey


def routes() -> SkipRoutes:
    module = nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))
    return SkipRoutes(module, list(module.named_children()), [range(n, n + 1) for n in range(4)])


def key(name: str) -> SkipKey:
    return SkipKey(None, name)


def stash(name: str) -> SkipEvent:
    return SkipEvent(key(name), stashes=True)


def pop(name: str) -> SkipEvent:
    return SkipEvent(key(name), stashes=False)


def test_what_passes_over_a_stage_has_a_route() -> None:
    found = routes()
    assert found.learn({0: [stash("far"), stash("near")], 1: [pop("near")], 3: [pop("far")]})
    assert found.by_stage == {0: {key("far"): 3}}
    assert found.ends == [(0, 3)]
    assert not found.learn({0: [stash("far")], 3: [pop("far")]})


def test_with_two_receivers_it_goes_from_stage_to_stage() -> None:
    found = routes()
    found.learn({0: [stash("x")], 3: [pop("x")]})
    assert found.learn({0: [stash("x")], 2: [pop("x")]})
    assert (found.by_stage, found.ends) == ({}, [])
