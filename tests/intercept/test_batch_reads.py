"""Ranks that have only what they read of the first batch: the numbers of one device, or an error that names the tensor.

Each rank learns in the first batch of a structure what its runs of the step read. In all later batches it has stand-ins
for all other tensors, in every model of the zoo and in random steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.batch_reads import BatchReads
from lightning_pipe.intercept.withheld import Withheld
from lightning_pipe.tensor_spec import TensorSpec
from lightning_pipe.torch_internals import tree_flatten, tree_unflatten
from tests.engine.test_equality import NAMED, cases
from tests.engine.test_random_programs import check as check_programs
from tests.support.asynchronous_engine import WIDTH, Block
from tests.support.engine_runs import assert_same
from tests.support.equality_sweep import Point, check
from tests.support.model_zoo import MAIN, SMALL, Entry

pytestmark = pytest.mark.usefixtures("float64", "withholding")

POINTS = [NAMED[0], Point("gpipe", stages=4, micro_batches=3, recompute="always")]


class Learning:
    """Learns on one rank, and withholds what was not read."""

    def __init__(self) -> None:
        self.reads: dict[str, set[int]] = {}
        self.withheld = 0

    @contextmanager
    def batch(self, pipeline: Pipeline, parts: list[Any]) -> Iterator[list[Any]]:
        flat = [tree_flatten(part) for part in parts]
        known = self.reads.get(str(flat[0][1]))
        if known is not None:
            yield [tree_unflatten([self._sent(at in known, leaf) for at, leaf in enumerate(f)], t) for f, t in flat]
            return
        stages = pipeline.training_executor.stages
        stages.reads = BatchReads()
        try:
            yield parts
        finally:
            self.reads[str(flat[0][1])], stages.reads = stages.reads.positions, None

    def _sent(self, read: bool, leaf: Any) -> Any:
        if read or not isinstance(leaf, Tensor):
            return leaf
        self.withheld += 1
        return Withheld(TensorSpec.of(leaf), "a tensor")


@pytest.fixture
def withholding(monkeypatch: pytest.MonkeyPatch) -> list[Learning]:
    """What every rank has learnt."""
    train, ranks = Pipeline.train, list[Learning]()

    def with_what_is_read(self: Pipeline, step: Any, parts: Any, *args: Any, **options: Any) -> Any:
        if not hasattr(self, "learning"):
            self.learning = Learning()  # type: ignore[attr-defined]
            ranks.append(self.learning)  # type: ignore[attr-defined]
        with self.learning.batch(self, list(parts)) as received:  # type: ignore[attr-defined]
            return train(self, step, received, *args, **options)

    monkeypatch.setattr(Pipeline, "train", with_what_is_read)
    return ranks


@pytest.mark.parametrize(("entry", "point"), cases(MAIN, POINTS[:1]))
def test_main_models(entry: Entry, point: Point, withholding: list[Learning]) -> None:
    check(entry, point)
    assert sum(each.withheld for each in withholding) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "point"), [*cases(SMALL, POINTS), *cases(MAIN, POINTS[1:])])
def test_small_models(entry: Entry, point: Point) -> None:
    check(entry, point)


@pytest.mark.parametrize("changes", [False, True])
def test_random_programs(changes: bool) -> None:
    check_programs(range(12), changes)


class Net(nn.Module):
    """A model that does something with its batch between layers."""

    def __init__(self, use: Callable[[Net, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)
        self.use, self.kept = use, torch.zeros(())

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        h = x
        for number, layer in enumerate(self.layers):
            h = layer(h)
            if number == 1:
                h = self.use(self, h, y, z)
        return F.mse_loss(self.head(h), y)


def batches(number: int = 3) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    return [{"x": torch.randn(6, WIDTH), "y": torch.randn(6, 1), "z": torch.rand(6, WIDTH)} for _ in range(number)]


def half_of(net: Net, h: Tensor, y: Tensor, z: Tensor) -> Tensor:
    made = z.flatten(1).clamp(max=1.0) * torch.ones(WIDTH) + z[:, :1]
    return h + made.unflatten(1, (2, -1)).flatten(1).to(h.dtype)


USES: dict[str, tuple[Callable[..., Tensor], list[str]]] = {
    # what each of two ranks reads
    "functions of shapes": (half_of, ["xz", "y"]),
    "a number": (lambda net, h, y, z: h * float(z.sum()), ["xz", "yz"]),
    "a decision": (lambda net, h, y, z: h * 2 if z.sum() > 0 else h, ["xz", "yz"]),
    "chosen by values": (lambda net, h, y, z: h + z[z > 0.5].sum(), ["xz", "yz"]),
    "changed in place": (lambda net, h, y, z: h + z.mul_(2), ["xz", "yz"]),
    "drawn like it": (lambda net, h, y, z: h + 0 * torch.rand_like(z), ["xz", "yz"]),
    "shapes alone": (lambda net, h, y, z: h * z.shape[1] + len(z.to(h.dtype)), ["x", "y"]),
    "kept": (lambda net, h, y, z: h + net.kept.copy_(z.sum()), ["xz", "yz"]),
}


@pytest.mark.parametrize("name", USES)
def test_what_counts_as_read(name: str, withholding: list[Learning]) -> None:
    use, read = USES[name]
    assert_same(Net(use), batches(), schedule="gpipe", recompute="always")
    found = ["".join("xyz"[at] for at in sorted(next(iter(each.reads.values())))) for each in withholding]
    assert sorted(found) == sorted(read)


@pytest.mark.parametrize(
    "use",
    [
        lambda net, h, y, z: h + z,
        lambda net, h, y, z: h * z.sum().item(),
        lambda net, h, y, z: h + z.clone().mul_(2),
        lambda net, h, y, z: net.layers[0](z),
        lambda net, h, y, z: h + torch.from_numpy(z.numpy()),
        lambda net, h, y, z: h * sum(z.flatten().tolist()),
    ],
)
def test_what_is_read_later_is_named(use: Callable[..., Tensor]) -> None:
    def change(net: Net, h: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return use(net, h, y, z) if type(z) is Withheld else h

    with pytest.raises(CutError, match=r"needs a tensor, which was not sent to this rank.*\n.*whole_batches=True"):
        assert_same(Net(change), batches(), schedule="gpipe")


def test_a_layer_does_not_compute_with_what_was_not_sent() -> None:
    """It finds it on a way that nobody sees."""
    found: list[Tensor] = []

    class Hidden(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + found[-1].mean()

    net = Net(lambda net, h, y, z: found.append(z) or h)  # type: ignore[func-returns-value]
    net.layers[2] = Hidden()
    with pytest.raises(CutError, match=r"'mean' needs a tensor, which was not sent"):
        assert_same(net, batches(), schedule="gpipe")
