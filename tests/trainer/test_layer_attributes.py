"""What steps set in layers is noted, put back, and set on other ranks."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn

from lightning_pipe.intercept.contents import Change
from lightning_pipe.trainer.layer_attributes import LayerAttributes


class Rank:
    """A rank with two layers, and its runs of the step."""

    def __init__(self) -> None:
        self.layers = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Sequential(nn.Dropout())})
        self.layers["a"].register_buffer("mean", torch.zeros(1))
        self.in_module = False
        self.has = set[nn.Module]()
        parts = {name: part for name, part in self.layers.named_modules() if name}
        self.attributes = LayerAttributes(parts, self)

    def setting(self, part: nn.Module, name: str, value: object) -> None:
        """Of no interest here."""

    def note_set(self, part: nn.Module, name: str) -> None:
        """Nor is this."""

    one_pipe, several, apart, watches = True, False, False, True

    def changed_elsewhere(self, part: nn.Module, name: str) -> bool:
        return part not in self.has

    def hide(self, part: nn.Module, name: str) -> None:
        """No hooks read anything here."""

    def adopts(self, part: nn.Module, name: str) -> None:
        """Nothing is kept for runs here."""

    def is_behind(self, part: nn.Module, name: str | None = None) -> bool:
        return False

    def has_run(self, part: nn.Module, *, now: bool = False) -> bool:
        return part in self.has


def test_what_a_complete_run_sets_is_set_on_the_other_ranks() -> None:
    one, other = Rank(), Rank()
    with one.attributes.installed():
        with one.attributes.noting(lambda: True, undo=True):
            one.layers["a"].scale = 2.0
            one.layers["a"].mean = torch.ones(1)
            one.layers["b"].eval()
            one.layers["a"].hook = print  # no data
            one.in_module = True
            one.layers["a"].calls = 1  # by the layer itself
        one.layers["a"].late = 1  # in no step
    changes = one.attributes.changes()
    assert one.attributes.changes() == []
    assert other.attributes.others(changes) == []
    other.attributes.adopt(changes)
    changed = ["self.a.scale", "self.a.mean", "self.b.training", "self.b.0.training"]
    assert other.attributes.adopted_since(0) == changed
    assert other.attributes.adopted_since(2) == changed[2:]
    assert (other.layers["a"].scale, other.layers["b"][0].training) == (2.0, False)
    assert other.layers["a"].get_buffer("mean").tolist() == [1.0]
    assert not {"hook", "calls", "late"} & {*vars(other.layers["a"])}
    # what is the same already was read by no layer in vain
    other.attributes.adopt([change for change in changes if isinstance(change.value, float | bool)])
    assert other.attributes.adopted_since(4) == []


def test_what_is_set_in_every_batch_is_known_once() -> None:
    rank = Rank()
    for number in range(50):
        rank.attributes.adopt([Change("set", ("a", ("attribute", "scale")), float(number))])
        assert rank.attributes.adopted_since(number) == rank.attributes.adopted_since(0) == ["self.a.scale"]
    assert rank.attributes.adopted_since(50) == []


def test_what_hooks_of_a_layer_set_is_its_own() -> None:
    rank = Rank()
    nn.utils.weight_norm(rank.layers["a"])

    def count(module: nn.Module, *_: object) -> None:
        module.calls = 1

    rank.layers["b"].register_forward_hook(count)
    with rank.attributes.installed(), rank.attributes.noting(lambda: True, undo=True):
        rank.layers["b"](rank.layers["a"](torch.ones(1, 1)))
        rank.layers["a"].scale = 2.0
    assert [change.path for change in rank.attributes.changes()] == [("a", ("attribute", "scale"))]


@pytest.mark.parametrize("undo", [True, False])
def test_what_a_run_has_set_that_ends_early_is_put_back_in_an_evaluation(undo: bool) -> None:
    rank = Rank()
    with (
        rank.attributes.installed(),
        suppress(KeyboardInterrupt),
        rank.attributes.noting(lambda: False, undo=undo),
    ):
        rank.layers["a"].scale = 2.0
        rank.layers["b"].eval()
        raise KeyboardInterrupt
    assert rank.attributes.latest.keys() == {"self.a.scale", "self.b.training", "self.b.0.training"}
    assert hasattr(rank.layers["a"], "scale") is not undo
    assert rank.layers["b"][0].training is undo
    assert rank.attributes.changes() == []


def test_nothing_stays_in_place_of_what_sets_attributes() -> None:
    before = nn.Module.__setattr__
    with Rank().attributes.installed():
        assert nn.Module.__setattr__ is not before
    assert nn.Module.__setattr__ is before
