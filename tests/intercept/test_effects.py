"""What layers leave behind besides their results is the same on all stages, or raises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from tests.support.equality_sweep import Point, check, pipelined
from tests.support.model_zoo import ZOO, Entry
from tests.support.pairs import pairs
from tests.support.zoo.base import WIDTH, Block, Regression, blocks

POINTS = [
    Point("1f1b", stages=2, micro_batches=3),
    Point("gpipe", stages=4, micro_batches=2, ranks=2),
    Point("interleaved", stages=4, micro_batches=4),
    Point("1f1b", stages=4, micro_batches=3, ranks=1),
    Point("1f1b", stages=4, micro_batches=3, evaluate=True),
    Point("gpipe", stages=2, micro_batches=3, recompute="always"),
]


class Kept(Regression):
    """Layers keep a loss of their own as an attribute, as mixtures of experts do."""

    class Layer(Block):
        own: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            self.own = x.square().mean()
            return x

    def __init__(self) -> None:
        super().__init__([self.Layer() for _ in range(4)])

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return super().loss(batch) + 0.1 * sum(layer.own for layer in self.layers)


class KeptInside(Regression):
    """Parts of layers keep tensors in lists and tuples."""

    class Layer(Block):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Identity()
            self.history: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            self.history.append(x.mean())
            self.part.pair = (x.abs().mean(), 2)
            return x

    def __init__(self) -> None:
        super().__init__([self.Layer() for _ in range(4)])

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        for layer in self.layers:
            layer.history = []
        loss = super().loss(batch)
        return loss + sum(sum(layer.history) + layer.part.pair[0] * layer.part.pair[1] for layer in self.layers)


class KeptWithoutGraph(Kept):
    """What layers keep scales the loss."""

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return Regression.loss(self, batch) * (1 + torch.stack([x.own.detach() for x in self.layers]).mean())


class KeptOutside(Regression):
    """A module before the layers keeps a loss that is read after them."""

    class Quantizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.code(x)
            self.loss = (y - x).square().mean()
            return y

    def __init__(self) -> None:
        super().__init__(blocks(4))
        self.quantizer = self.Quantizer()

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.quantizer(self.embed(batch["x"]))
        early = 2 * self.quantizer.loss
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x), batch["y"]) + self.quantizer.loss + early


class AppendsToAList(Regression):
    """Layers append to a list that they are given."""

    class Layer(Block):
        def forward(self, x: Tensor, states: list[Tensor], *, info: dict[str, Any]) -> Tensor:
            x = super().forward(x)
            states.append(x)
            info["sum"] = info.get("sum", 0) + x.mean()
            info["count"] = info.get("count", 0) + 1
            return x

    def __init__(self) -> None:
        super().__init__([self.Layer() for _ in range(4)])

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x, states, info = self.embed(batch["x"]), [], {}
        for layer in self.layers:
            x = layer(x, states, info=info)
        more = info["sum"] / info["count"] + torch.stack(states).square().mean()
        return F.mse_loss(self.head(x), batch["y"]) + more


class ChangesADictionary(Regression):
    """Layers change the dictionary that they are given and return it; both names see it."""

    class Layer(Block):
        def forward(self, state: dict[str, Any]) -> dict[str, Any]:
            state["x"] = super().forward(state["x"])
            state["inner"]["seen"].append(state["x"].mean())
            return state

    def __init__(self) -> None:
        super().__init__([self.Layer() for _ in range(4)])

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        state = given = {"x": self.embed(batch["x"]), "inner": {"seen": []}}
        for layer in self.layers:
            state = layer(state)
            given["x"] = given["x"] * 1.1
        assert state is given
        return F.mse_loss(self.head(state["x"]), batch["y"]) + sum(given["inner"]["seen"])


class ReturnsTwice(Regression):
    """Layers return one tensor in two places."""

    class Layer(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
            x = super().forward(x) * 1.0
            return x, [x]

    def __init__(self) -> None:
        super().__init__([self.Layer() for _ in range(4)])

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x, total = self.embed(batch["x"]), 0.0
        for layer in self.layers:
            x, (same,) = layer(x)
            assert same is x
            same.mul_(1.1)
            total = total + x.mean()
        return F.mse_loss(self.head(x), batch["y"]) + total


class OuterHooks(Regression):
    """Hooks on the layers themselves collect what they return."""

    def __init__(self) -> None:
        super().__init__(blocks(4))
        self.seen: list[Tensor] = []
        for layer in self.watched():
            layer.register_forward_hook(self.note)

    def watched(self) -> list[nn.Module]:
        return list(self.layers)

    def note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.append(output)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        self.seen.clear()
        loss = super().loss(batch) + torch.stack(self.seen).square().mean()
        self.seen.clear()
        return loss


class Mapped(Regression):
    """torch.func's transformations run outside the layers: their results come from no torch call."""

    def __init__(self) -> None:
        super().__init__(blocks(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.func.functional_call(self.embed, dict(self.embed.named_parameters()), (x,))
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.vmap(torch.sin)(x))


class AsksForGradients(Regression):
    """The path depends on whether a tensor requires a gradient, which placeholders must say as well."""

    def __init__(self) -> None:
        super().__init__(blocks(4))
        for module in (self.embed, self.layers[0]):
            module.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) * 1.1 if x.requires_grad else layer(x)
        return self.head(x)


EXACT = [AsksForGradients, Mapped, KeptInside, Kept, KeptOutside, AppendsToAList,
         KeptWithoutGraph, ReturnsTwice, OuterHooks, ChangesADictionary]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "point"),
    pairs(EXACT, POINTS, lambda model, point: model % 3 == 0 and (model + 2) % len(POINTS) == point),
)
def test_it_is_the_same_on_all_stages(model: type[Regression], point: Point) -> None:
    entry = Entry(model.__name__, model, layers="layers")
    if model is KeptInside and point.recompute != "never":  # a second run would find the list as the first has left it
        with pytest.raises(CutError, match=r"`self\.layers\.0\.history` is changed in place"):
            pipelined(entry, point)
    else:
        check(entry, point)


class InnerPreHooks(OuterHooks):
    """Hooks before parts of the layers collect what comes of what the parts are given: others' are missing."""

    def watched(self) -> list[nn.Module]:
        return []

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.linear.register_forward_pre_hook(lambda module, args: self.seen.append(args[0] * 1.0))


@dataclass
class State:
    states: list[Tensor] = field(default_factory=list)


class ChangesAnObject(Regression):
    """Layers change an object of the user's own."""

    class Layer(Block):
        def forward(self, x: Tensor, state: State) -> Tensor:
            x = super().forward(x)
            state.states.append(x)
            return x

    def __init__(self) -> None:
        super().__init__([self.Layer() for _ in range(4)])

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x, state = self.embed(batch["x"]), State()
        for layer in self.layers:
            x = layer(x, state)
        return F.mse_loss(self.head(x), batch["y"]) + sum(x.mean() for x in state.states)


class ReadBeforeChanged(Regression):
    """A buffer follows the last activation, and the first stage reads it."""

    def __init__(self) -> None:
        super().__init__(blocks(4))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["x"]) - self.mean
        for layer in self.layers:
            x = layer(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return F.mse_loss(self.head(x), batch["y"])


class ReadInLayerChanged(ReadBeforeChanged):
    """The layers read it, which get it as an argument."""

    class Layer(Block):
        def forward(self, x: Tensor, mean: Tensor) -> Tensor:
            return super().forward(x - mean)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["x"])
        for layer in self.layers:
            x = layer(x, self.mean)
        with torch.no_grad():
            self.mean.copy_(0.1 * x.mean(0))
        return F.mse_loss(self.head(x), batch["y"])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ReadBeforeChanged, "'sub', .* is given other values here"),
        (ReadInLayerChanged, r"'layers\.0', .* is given other values here"),
        (InnerPreHooks, r"'layers\.0' changes `self\.seen` in its forward pass, which belongs to another module"),
        (ChangesAnObject, r"'layers\.0' changes its argument of type State"),
    ],
)
def test_what_other_stages_cannot_see_raises(model: type[Regression], message: str) -> None:
    entry = Entry(model.__name__, model, layers="layers")
    with pytest.raises(CutError, match=message):
        pipelined(entry, Point("1f1b", stages=2))
    check(entry, Point("1f1b", stages=1))


def test_stand_ins_leave_no_attributes() -> None:
    modules: list[Kept] = []

    def construct() -> Kept:
        modules.append(Kept())
        return modules[-1]

    pipelined(Entry("kept", construct, layers="layers"), Point("1f1b", stages=4))
    assert len(modules) == 4
    kept = [["own" in vars(layer) for layer in module.layers] for module in modules]
    assert sorted(kept) == sorted([[rank == number for number in range(4)] for rank in range(4)])


def test_model_caches_are_off_while_steps_run() -> None:
    seen: list[bool] = []

    def construct() -> Any:
        module = ZOO["llama"].construct()
        loss = module.loss
        module.loss = lambda batch: seen.append(module.model.config.use_cache) or loss(batch)
        return module

    entry = Entry("llama", construct, ZOO["llama"].batches)
    with pytest.warns(UserWarning, match="use_cache"):
        pipelined(entry, Point("1f1b", stages=2, steps=2))
    assert seen
    assert not any(seen)
    assert ZOO["llama"].build().model.config.use_cache
