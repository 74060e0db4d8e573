"""Skip connections: torchgpipe's interface, alone and over stages."""

from __future__ import annotations

import copy
import pickle
from itertools import combinations, pairwise
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


@skippable(stash=["early"])
class DeclaredDown(Down):
    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.conv(x))
        yield stash("early", x)
        return F.max_pool2d(x, 2)


@skippable(pop=["early"])
class DeclaredUp(Up):
    def forward(self, x: Tensor) -> Any:
        early = yield pop("early")
        return torch.tanh(self.conv(torch.cat([F.interpolate(x, early.shape[-2:]), early], 1)))


class DeclaredUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        a, b, c = Namespace(), Namespace(), Namespace()
        self.layers = nn.Sequential(
            DeclaredDown("", 1, 2).isolate(a), DeclaredDown("", 2, 3).isolate(b), DeclaredDown("", 3, 4).isolate(c),
            nn.Conv2d(4, 4, 3, padding=1), DeclaredUp("", 8, 4).isolate(c), DeclaredUp("", 7, 3).isolate(b),
            DeclaredUp("", 5, 2).isolate(a), nn.Conv2d(2, 1, 1),
        )  # fmt: skip
        verify_skippables(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), x)


@pytest.mark.parametrize("recompute", ["never", "always", "except_last"])
@pytest.mark.parametrize("balance", [[1, 2, 3, 2], [2, 2, 2, 2], [1, 1, 1, 5], [5, 1, 1, 1], [1, 3, 1, 3]], ids=str)
def test_declared_skips_go_straight_whatever_the_balance(balance: list[int], recompute: str) -> None:
    data = [images(), images(), images(3)]
    schedule = "gpipe" if sum(balance[:2]) % 2 else "1f1b"
    options: dict[str, Any] = {"ranks": 4, "schedule": schedule, "balance": balance, "recompute": recompute}
    assert_same(DeclaredUNet(), data, micro_batches=2, layers="layers", **options)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["never", "always", "except_last"])
def test_declared_skips_go_straight_in_all_balances(recompute: str) -> None:
    for cuts in combinations(range(1, 8), 3):
        balance = [end - start for start, end in pairwise((0, *cuts, 8))]
        options: dict[str, Any] = {"ranks": 4, "schedule": "gpipe", "balance": balance, "recompute": recompute}
        assert_same(DeclaredUNet(), [images(), images()], micro_batches=2, layers="layers", **options)


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble", "chimera", "gems", "dualpipev"])
def test_declared_skips_go_straight_in_any_schedule(schedule: str) -> None:
    assert_same(DeclaredUNet(), [images()] * 3, micro_batches=3, ranks=2, schedule=schedule, layers="layers")


class Wide(nn.Module):
    """A large tensor from the first layer to the last, a small one through the layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Narrowing(), nn.Linear(1, 1), nn.Linear(1, 1), Widening())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


@skippable(stash=["wide"])
class Narrowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1000, 1)

    def forward(self, x: Tensor) -> Any:
        yield stash("wide", x * self.linear.weight)
        return self.linear(x)


@skippable(pop=["wide"])
class Widening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * (yield pop("wide"))


def test_a_skip_passes_over_the_ranks_between() -> None:
    sent: dict[int, list[int]] = {rank: [] for rank in range(4)}

    def note(pipeline: Any, module: nn.Module) -> None:
        sent[pipeline.transport.rank].append(pipeline.executor.courier.sent_bytes)

    data = [{"x": torch.randn(4, 1000)}] * 3
    assert_same(Wide(), data, micro_batches=1, ranks=4, layers="layers", between=note)
    per_batch = {rank: totals[-1] - totals[-2] for rank, totals in sent.items()}
    wide = 4 * 1000 * 8
    assert wide <= per_batch[0] < wide + 500
    assert wide <= per_batch[3] < wide + 500
    assert per_batch[1] < 500
    assert per_batch[2] < 500


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
