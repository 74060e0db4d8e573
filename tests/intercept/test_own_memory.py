"""Tensors that every stage makes for itself, and layers that return them, or views of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pipe.errors import CutError
from tests.support.asynchronous_engine import WIDTH, Block
from tests.support.engine_runs import assert_evaluates, assert_same, pipelined
from tests.support.pairs import every_second, pairs, slow_but

pytestmark = pytest.mark.usefixtures("float64")


class View(nn.Module):
    """Returns a view of its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :]


class Detach(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Scratch(nn.Module):
    """Knows a tensor of the step's own by an attribute, and returns it, or a view of it."""

    scratch: Any = None

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.returns = returns

    def forward(self, x: Tensor) -> Tensor:
        return {"view": self.scratch[:, :], "itself": self.scratch}[self.returns]


class Writes(Scratch):
    def forward(self, x: Tensor) -> Tensor:
        self.scratch[:, 1:].copy_(x.detach()[:, 1:])
        return x * 1.0


class Net(nn.Module):
    """The first layer gets, or knows, a tensor of the step's own; ``change`` is called before the named layer."""

    def __init__(self, first: nn.Module, changed: str, before: int) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([first, *(Block() for _ in range(4))])
        self.head = nn.Linear(WIDTH, 1)
        self.changed, self.before = changed, before

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        whole = torch.ones(len(x), 2, WIDTH)
        own = whole[:, 1]
        if isinstance(self.layers[0], Scratch):
            self.layers[0].scratch = own
            returned = self.layers[0](h)
        else:
            returned = self.layers[0](own)
        for number in range(1, 6):
            if number == self.before and self.changed:
                {"own": own, "returned": returned, "whole": whole}[self.changed].add_(1)
            if number == self.before and self.changed == "own":
                own[:, 0] = h.detach()[:, 0]
            if number < 5:
                h = self.layers[number](h)
        return F.mse_loss(self.head(h * returned + own + whole.sum(1)), y)


def batch(samples: int = 5) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, WIDTH), "y": torch.randn(samples, 1)}


RUNS = [{"ranks": 2}, {"ranks": 1, "stages": 5}]


@pytest.fixture(params=slow_but(RUNS, RUNS[0]), ids=["2", "1-5"])
def run(request: pytest.FixtureRequest) -> Any:
    return request.param


FIRST = {
    "view": lambda: View(),
    "detach": lambda: Detach(),
    "scratch_view": lambda: Scratch("view"),
    "scratch_itself": lambda: Scratch("itself"),
}


def outcome(first: str, changed: str, before: int, run: dict[str, Any]) -> str:
    """``equal`` or ``refused``; a wrong number fails."""
    found = set()
    for check in (
        lambda model: assert_same(model, [batch(), batch(), batch()], layers="layers", **run),
        lambda model: assert_evaluates(model, batch(), batch(), torch.no_grad, layers="layers", **run),
        lambda model: assert_evaluates(model, batch(), batch(), torch.inference_mode, layers="layers", **run),
    ):
        try:
            check(Net(FIRST[first](), changed, before))
            found.add("equal")
        except CutError as error:
            found.add("refused" if "memory" in error.message else error.message)
    return " ".join(sorted(found))


@pytest.mark.parametrize("first", FIRST)
def test_a_layer_may_return_what_every_stage_has(first: str, run: dict[str, Any]) -> None:
    assert outcome(first, "", 0, run) == "equal"


def test_a_layer_must_not_change_a_tensor_that_is_no_buffer(run: dict[str, Any]) -> None:
    net = Net(Writes(""), "", 0)
    with pytest.raises(CutError, match=r"changes `self\.layers\.0\.scratch` in place, a tensor that is no buffer"):
        pipelined(net, [batch()], 1, layers="layers", **run)


@pytest.mark.parametrize(("first", "changed"), pairs(list(FIRST), ["own", "returned", "whole"], every_second))
def test_changes_in_place_are_refused(first: str, changed: str) -> None:
    for before in (1, 3, 5):
        assert outcome(first, changed, before, {"ranks": 1, "stages": 5}) == "refused", f"before layer {before}"
