"""Skip connections over stages: they go straight from the stage that stashes to the one that pops."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pipe import schedules, skip
from lightning_pipe.skip import Namespace, SkipError, pop, skippable, stash, verify_skippables
from tests.skip.test_layers import Pop
from tests.support import asynchronous_engine
from tests.support.engine_runs import assert_same, pipelined
from tests.support.pairs import pairs, slow_but

pytestmark = pytest.mark.usefixtures("float64")


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


@pytest.mark.parametrize(
    ("balance", "recompute"),
    pairs(
        [[1, 2, 3, 2], [1, 1, 1, 5], [5, 1, 1, 1]],
        ["never", "always", "except_last"],
        lambda balance, recompute: balance == recompute < 2,
    ),
)
def test_declared_skips_go_straight_whatever_the_balance(balance: list[int], recompute: str) -> None:
    data = [images(), images(), images(3)]
    schedule = "gpipe" if sum(balance[:2]) % 2 else "1f1b"
    options: dict[str, Any] = {"ranks": 4, "schedule": schedule, "balance": balance, "recompute": recompute}
    assert_same(DeclaredUNet(), data, micro_batches=2, layers="layers", **options)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["never", "always", "except_last"])
@pytest.mark.parametrize("net", [UNet, DeclaredUNet])
def test_skips_go_straight_in_all_balances(net: Any, recompute: str) -> None:
    for cuts in combinations(range(1, 8), 3):
        balance = [end - start for start, end in pairwise((0, *cuts, 8))]
        options: dict[str, Any] = {"ranks": 4, "schedule": "gpipe", "balance": balance, "recompute": recompute}
        assert_same(net(), [images(), images()], micro_batches=2, layers="layers", **options)


@pytest.mark.parametrize(
    ("net", "schedule"),
    pairs(
        [UNet, DeclaredUNet],
        ["interleaved", "zero_bubble", "chimera", "gems", "dualpipev"],
        lambda net, schedule: net == schedule,
    ),
)
def test_skips_go_straight_in_any_schedule(net: Any, schedule: str) -> None:
    assert_same(net(), [images()] * 3, micro_batches=3, ranks=2, schedule=schedule, layers="layers")


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
        sent[pipeline.transport.rank].append(pipeline.transport.sent)

    data = [{"x": torch.randn(4, 1000)}] * 3
    assert_same(Wide(), data, micro_batches=1, ranks=4, layers="layers", between=note)
    per_batch = {rank: totals[-1] - totals[-2] for rank, totals in sent.items()}
    wide = 4 * 1000 * 8
    assert wide <= per_batch[0] < wide + 500
    assert wide <= per_batch[3] < wide + 500
    assert per_batch[1] < 500
    assert per_batch[2] < 500


WIDTH = 300


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, decoded: Tensor, encoded: Tensor) -> Tensor:
        return torch.tanh(self.linear(decoded + encoded))


class SideInput(nn.Module):
    """Every layer of a decoder reads what an encoder has made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), *(Reading() for _ in range(4))])

    def forward(self, x: Tensor) -> Tensor:
        encoded, decoded = self.layers[0](x), x
        for layer in self.layers[1:]:
            decoded = layer(decoded, encoded)
        return decoded.square().mean()


def test_a_side_input_crosses_each_cut_once() -> None:
    """As few bytes as from its stage straight to each of those that read it, and no stage sends to all of them."""
    sent: dict[int, list[int]] = {rank: [] for rank in range(4)}

    def note(pipeline: Any, module: nn.Module) -> None:
        sent[pipeline.transport.rank].append(pipeline.transport.sent)

    data = [{"x": 0.1 * torch.randn(4, WIDTH)}] * 3
    assert_same(SideInput(), data, 1, ranks=4, balance=[1, 2, 1, 1], layers="layers", schedule="gpipe", between=note)
    # forward: the side input over 3 cuts, the decoder's state over 2; backward: the same
    tensors = {0: 1, 1: 2 + 1, 2: 2 + 2, 3: 2}
    for rank, expected in tensors.items():
        assert sent[rank][-1] - sent[rank][-2] == pytest.approx(expected * 4 * WIDTH * 8, abs=1000), rank


def test_a_pop_without_stash_over_stages_raises() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 2), Pop())

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).sum()

    with pytest.raises(SkipError, match=r"'x' is popped by 'layers\.1' and stashed by no layer before it"):
        pipelined(Broken(), [{"x": torch.ones(2, 2)}], 1, layers="layers")


class Through(nn.Module):
    """Layers between an embedding and a head, with a skip past all of them: in plain code, or declared."""

    def __init__(self, *, declared: bool) -> None:
        super().__init__()
        self.declared, self.embed, self.head = declared, nn.Linear(6, 6), nn.Linear(6, 6)
        begins, ends = (Declares, Pops) if declared else (Passes, Passes)
        self.layers = nn.ModuleList([begins(), Passes(), Passes(), ends()])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = early = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        if not self.declared:
            x = x + early
        return F.mse_loss(self.head(x), y)


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.linear(x))


@skippable(stash=["early"])
class Declares(Passes):
    def forward(self, x: Tensor) -> Any:
        yield stash("early", x)
        return torch.tanh(self.linear(x))


@skippable(pop=["early"])
class Pops(Passes):
    def forward(self, x: Tensor) -> Any:
        early = yield pop("early")
        return torch.tanh(self.linear(x)) + early


@pytest.mark.parametrize(
    ("schedule", "micro_batches"), slow_but([("pipedream", 1), ("pipedream_2bw", 4)], ("pipedream", 1))
)
def test_declared_skips_are_those_of_plain_code_without_a_flush(schedule: str, micro_batches: int) -> None:
    found = []
    for declared in (False, True):
        torch.manual_seed(0)
        options: dict[str, Any] = {"micro_batches": micro_batches, "recompute": "always"}
        net, data = Through(declared=declared), asynchronous_engine.batches(6)
        found.append(asynchronous_engine.pipelined(net, data, 4, schedules.get(schedule), **options).losses)
    assert found[1] == pytest.approx(found[0], abs=1e-12)
