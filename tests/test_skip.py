"""Skip connections: torchgpipe's interface, alone and over stages."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pipe import skip
from lightning_pipe.skip import Namespace, SkipError, pop, skippable, stash, verify_skippables
from tests.pipeline.engine import assert_same, pipelined


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@skippable(stash=["x"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("x", x)
        return x * 2


@skippable(pop=["x"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("x"))


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def test_layers_work_without_a_pipeline() -> None:
    x = torch.randn(3)
    assert torch.equal(nn.Sequential(Stash(), Plain(), Pop())(x), torch.tanh(2 * x) + x)


def test_namespaces_keep_equal_names_apart() -> None:
    outer, inner = Namespace(), Namespace()
    net = nn.Sequential(Stash().isolate(outer), Stash().isolate(inner), Pop().isolate(inner), Pop().isolate(outer))
    x = torch.randn(3)
    assert torch.equal(net(x), 4 * x + 2 * x + x)
    verify_skippables(net)


def test_a_layer_keeps_its_name_and_state() -> None:
    layer = Stash()
    assert type(layer).__name__ == "Stash"
    assert isinstance(pickle.loads(pickle.dumps(layer.isolate(Namespace()))), Stash)
    assert copy.deepcopy(layer).namespaces == layer.namespaces


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ([Stash()], "is stashed by '0' and never popped"),
        ([Pop()], "is popped by '0' and stashed by no layer before it"),
        ([Pop(), Stash()], "is popped by '0' and stashed by no layer before it"),
        ([Stash(), Stash(), Pop()], "is stashed by '0' and again by '1'"),
        ([Stash(), Pop(), Pop()], "is popped by '1' and again by '2'"),
    ],
)
def test_what_does_not_fit_is_listed(layers: list[nn.Module], problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        verify_skippables(nn.Sequential(*layers))


def test_undeclared_and_forgotten_names_raise() -> None:
    @skippable(stash=["a"])
    class Undeclared(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("b", x)
            return x

    @skippable(stash=["a"])
    class Forgotten(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x

    with pytest.raises(SkipError, match="'b' without declaring it"):
        Undeclared()(torch.ones(1))
    with pytest.raises(SkipError, match="declares 'a'"):
        Forgotten()(torch.ones(1))
    with pytest.raises(SkipError, match="no earlier layer has stashed it"):
        skip.take("nothing")
    with pytest.raises(SkipError, match="neither stashes nor pops 'y'"):
        Stash().isolate(Namespace(), only=["y"])
    with pytest.raises(SkipError, match="needs names"):
        skippable()


class Down(nn.Module):
    """Stashes by the plain-function form, and with a tensor that has no gradient beside it."""

    def __init__(self, name: str, inside: int, outside: int) -> None:
        super().__init__()
        self.name, self.conv = name, nn.Conv2d(inside, outside, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x))
        skip.put(self.name, x)
        skip.put(f"{self.name} size", torch.tensor(x.shape[-2:]))
        return F.max_pool2d(x, 2)


class Up(nn.Module):
    def __init__(self, name: str, inside: int, outside: int) -> None:
        super().__init__()
        self.name, self.conv = name, nn.Conv2d(inside, outside, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        size, early = skip.take(f"{self.name} size"), skip.take(self.name)
        assert size is not None
        assert early is not None
        return torch.tanh(self.conv(torch.cat([F.interpolate(x, tuple(size.tolist())), early], 1)))


class UNet(nn.Module):
    """Skips of every length over eight layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            Down("a", 1, 2), Down("b", 2, 3), Down("c", 3, 4), nn.Conv2d(4, 4, 3, padding=1),
            Up("c", 8, 4), Up("b", 7, 3), Up("a", 5, 2), nn.Conv2d(2, 1, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), x)


def images(samples: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 1, 8, 8)}


@pytest.mark.parametrize(
    "options", [{"ranks": 2}, {"ranks": 4, "schedule": "gpipe"}, {"ranks": 2, "schedule": "interleaved"}]
)
def test_a_unet_over_stages_equals_one_device(options: dict[str, Any]) -> None:
    assert_same(UNet(), [images(), images(), images(3)], micro_batches=2, layers="layers", **options)


def test_a_pop_without_stash_over_stages_raises() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 2), Pop())

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).sum()

    with pytest.raises(SkipError, match="no earlier layer has stashed it"):
        pipelined(Broken(), [{"x": torch.ones(2, 2)}], 1, layers="layers")
