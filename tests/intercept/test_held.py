"""Dataclasses that layers return: the next stages compute with them as one device does, and gradients come back."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import Passed
from tests.intercept.test_describe import Returns
from tests.intercept.test_skipped_layers import answered, recorded
from tests.support.returning_layers import Make, ReturningLayers, assert_crosses_cuts


@dataclass
class Plain:
    h: Tensor
    name: str = "plain"
    more: Any = None


@dataclass
class Doubled:
    """Would double once more if it were made by its constructor on the other rank."""

    h: Tensor
    factor: InitVar[float] = 1.0
    late: Tensor | None = field(init=False, default=None)

    def __post_init__(self, factor: float) -> None:
        self.h = self.h * 2
        self.late = self.h * factor


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Frozen:
    h: Tensor
    size: torch.Size = field(default_factory=torch.Size)


@dataclass(slots=True)
class SlotsOnly:
    h: Tensor


class More(Plain):
    """With an attribute that is no field."""

    extra: Tensor


class MoreSlots(Frozen):
    __slots__ = ("extra",)


def more(h: Tensor, kind: Callable[[Tensor], Any]) -> Any:
    made = kind(h)
    object.__setattr__(made, "extra", h.exp())
    return made


MAKE: dict[str, Make] = {
    "plain": Plain,
    "post_init": lambda h: Doubled(h, 3.0),
    "frozen": lambda h: Frozen(h, h.shape),
    "subclass": lambda h: more(h, More),
    "slots": lambda h: more(h, MoreSlots),
    "nested": lambda h: Plain(h, more={"list": [Doubled(h.exp()), Plain(h.sin(), "inner")]}),
    "list": lambda h: [Plain(h), (Frozen(h.tanh()), None)],
}


def tensors(value: Any) -> list[Tensor]:
    """All that is in a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [each for one in value for each in tensors(one)]
    if isinstance(value, dict):
        return tensors([*value.values()])
    names = [name for name in ("h", "late", "more", "extra") if hasattr(value, name)]
    return tensors([getattr(value, name) for name in names])


class Score(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, found: Any, x: Tensor) -> Tensor:
        return self.weight * torch.stack([each * x for each in tensors(found)]).square().sum((0, -1))


class Model(ReturningLayers):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        first, head, last, score = self.layers
        found = head(first(batch))
        assert type(found) is type(head.make(batch))  # code between the layers reads it as ever
        if isinstance(found, Plain):
            found = replace(found, h=found.h + 1) if type(found) is Plain else found
        return score(found, last(batch)).mean()


@pytest.mark.parametrize("kind", MAKE)
def test_a_dataclass_crosses_a_cut(kind: str) -> None:
    assert_crosses_cuts(lambda: Model(MAKE[kind], Score(), rate=0.01))


def test_another_rank_gets_the_same_class_with_the_same_attributes() -> None:
    module, x = Returns(MAKE["nested"]), torch.ones(2, 3, requires_grad=True)
    _, call, _ = recorded(module, x)
    found, _ = answered(pickle.loads(pickle.dumps(call)), module, x)
    assert type(found) is Plain
    assert found.name == "plain"
    inner = found.more["list"]
    assert [type(each) for each in inner] == [Doubled, Plain]
    assert vars(inner[0]).keys() == {"h", "late"}
    assert inner[1].name == "inner"
    assert inner[1].h.shape == (2, 3)


def test_one_that_was_given_is_the_same_object() -> None:
    module, given = Returns(lambda state: [state, state.h * 2]), Plain(torch.ones(2, requires_grad=True))
    _, call, _ = recorded(module, given)
    assert call.leaves[0] == Passed(0)
    assert answered(call, module, given)[0][0] is given


@pytest.mark.parametrize("kind", [Plain, SlotsOnly])
def test_a_layer_that_changes_one_raises(kind: Any) -> None:
    def changed(state: Any) -> Any:
        state.h = state.h * 2
        return state

    with pytest.raises(CutError, match="changes its argument of type"):
        recorded(Returns(changed), kind(torch.ones(2, requires_grad=True)))


@dataclass
class Ring:
    h: Tensor
    other: Any = None


def test_what_holds_itself_or_what_is_no_tensor_raises() -> None:
    def ring(x: Tensor) -> Ring:
        made = Ring(x * 2)
        made.other = [made]
        return made

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(CutError, match="returns a Ring, which cannot be shown"):
        recorded(Returns(ring), x)
    with pytest.raises(CutError, match="returns a object, which cannot be shown"):
        recorded(Returns(lambda x: Plain(x * 2, more=object())), x)


@dataclass
class Part(nn.Module):
    width: int = 2


def test_a_module_is_no_dataclass_to_be_shown() -> None:
    with pytest.raises(CutError, match="returns a Part, which cannot be shown"):
        recorded(Returns(lambda x: Part.__new__(Part)), torch.ones(2))
