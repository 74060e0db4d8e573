"""Two micro-batches in one forward pass: what one device computes, in fewer passes, or apart where that is not so."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pipe.engine.joint_forward import UnlikeError, both_together
from lightning_pipe.engine.pipeline import Pipeline
from lightning_pipe.errors import CutError
from lightning_pipe.intercept.call_record import LiveTensor, RunRecord
from lightning_pipe.intercept.crossing import Crossing
from lightning_pipe.intercept.library_draws import LibraryDraws
from lightning_pipe.intercept.random_streams import RandomStreams
from lightning_pipe.schedules import Chimera
from lightning_pipe.tensor_spec import TensorSpec
from tests.support.engine_runs import Outcome, assert_same, pipelined
from tests.support.pairs import slow_but
from tests.support.small_net import WIDTH, Block, Net, batch
from tests.support.threads import Draws

DOUBLING, HALVING = Chimera(scaling="forward_doubling"), Chimera(scaling="backward_halving")

pytestmark = pytest.mark.usefixtures("float64")


def passes(outcome: Outcome) -> list[int]:
    return [pipeline.executor.joint.passes for pipeline in outcome.pipelines]


def with_layers(*layers: nn.Module) -> Net:
    """A net with these layers before blocks of its own."""
    net = Net()
    net.layers = nn.ModuleList([*layers, *net.layers[len(layers) :]])
    return net


class Counted(Block):
    """Notes the samples of each call, by thread."""

    seen: ClassVar[dict[int, list[int]]] = defaultdict(list)

    def forward(self, x: Tensor) -> Tensor:
        self.seen[threading.get_ident()].append(len(x))
        return super().forward(x)


@pytest.mark.parametrize(("schedule", "recompute"), [(DOUBLING, "never"), (HALVING, "always")])
def test_a_slot_is_one_pass_over_the_samples_of_both(schedule: Chimera, recompute: str) -> None:
    calls: list[list[int]] = []

    def look(pipeline: Pipeline, module: nn.Module) -> None:
        calls.append(Counted.seen.pop(threading.get_ident()))

    net = with_layers(Counted())
    found = assert_same(
        net, [batch(8) for _ in range(4)], 4, schedule=schedule, recompute=recompute, layers="layers", between=look
    )
    assert passes(found) == [2, 2]
    assert calls.count([4, 2, 2]) == 4, "one forward pass, two recomputed parts, from the third batch on"


def test_halves_that_are_not_recomputed_are_two_passes() -> None:
    found = assert_same(Net(), [batch(8) for _ in range(4)], 4, schedule=HALVING, layers="layers")
    assert passes(found) == [0, 0]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_odd_samples_odd_micro_batches_and_a_short_batch(ranks: int) -> None:
    """Micro-batches of 3 and 2 samples, and of 2 and 1, each put together and taken apart by its own sizes."""
    sizes = [11, 11, 6, 11, 6, 11, 6]
    found = assert_same(Net(), [batch(size) for size in sizes], 5, ranks=ranks, schedule=DOUBLING, layers="layers")
    assert passes(found) == [3, 3] if ranks == 2 else min(passes(found)) > 0


class Residual(Net):
    """What was before the layers goes over the cut beside what comes from them."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        first = h
        for layer in self.layers:
            h = h + layer(h)
        return h + first


class Placed(Net):
    """What goes over the cut beside the samples is the same for all of them: a value for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(WIDTH, 1)

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        places = self.positions(torch.arange(WIDTH)).flatten()
        for layer in self.layers:
            h = layer(h)
        return h + places


@pytest.mark.parametrize("net", slow_but([Residual, Placed], Placed))
def test_what_crosses_is_taken_apart(net: type[Net]) -> None:
    found = assert_same(net(), [batch(8) for _ in range(4)], 4, schedule=DOUBLING, layers="layers")
    assert passes(found) == [2, 2]


class TimeFirst(Net):
    """Samples lie along the second dimension of what crosses."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        h = torch.stack([h, h * 2, h * 3])
        for layer in self.layers:
            h = layer(h)
        return h.mean(0)


class Flattened(Net):
    """The step gives the number of samples to a function of what comes from layers."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        h = self.layers[0](h).view(len(x), -1)
        for layer in self.layers[1:]:
            h = layer(h)
        return h


class Penalised(Net):
    """A penalty goes over the cut that is 0 for two micro-batches by chance."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        penalty = F.relu(h.abs().mean() - 100)
        for layer in self.layers:
            h = layer(h)
        return h + penalty


class Norm(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(WIDTH, track_running_stats=False)


def normed() -> Net:
    return with_layers(Norm())


@pytest.mark.parametrize(
    "net",
    slow_but([normed, Flattened, Penalised, TimeFirst], normed, Penalised),
    ids=["batch norm", "number of samples", "penalty", "time first"],
)
def test_what_may_depend_on_the_other_samples_runs_apart(net: Any) -> None:
    found = assert_same(net(), [batch(8) for _ in range(4)], 4, schedule=DOUBLING, layers="layers")
    assert passes(found) == [0, 0]


def test_random_numbers_run_apart() -> None:
    """Each micro-batch has its own."""
    found = pipelined(with_layers(Draws()), [batch(8) for _ in range(4)], 4, schedule=DOUBLING, layers="layers")
    assert passes(found) == [0, 0]


def test_draws_are_seen() -> None:
    streams = RandomStreams(0, torch.device("cpu"), draws=LibraryDraws(1))
    with streams.batch():
        for draws in (False, True):
            streams.seed_user_code(0)
            with streams.noting_draws() as drew:
                with streams.isolated(0, 0):
                    F.dropout(torch.ones(8), training=draws)
                streams.end_user_code()
            assert (True in drew) is draws
        streams.seed_user_code(0)
        with streams.noting_draws() as drew:
            torch.rand(1)
            streams.end_user_code()
        assert True in drew


class Centred(Block):
    """Depends on the other samples in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0) if self.training else x)


def test_layers_that_go_to_training_are_compared_anew() -> None:
    ended: list[Pipeline] = []

    def change(pipeline: Pipeline, module: Any) -> None:
        ended.append(pipeline)
        module.layers[0].train(ended.count(pipeline) > 2)

    net = with_layers(Centred())
    net.layers[0].eval()
    found = pipelined(net, [batch(8) for _ in range(6)], 4, schedule=DOUBLING, layers="layers", between=change)
    assert passes(found) == [1, 1]


class Keeps(Block):
    """Begins to count its calls."""

    counts = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls = self.calls + 1
        return super().forward(x)


def test_layers_that_begin_to_keep_something_are_an_error() -> None:
    ended: list[Pipeline] = []

    def change(pipeline: Pipeline, module: Any) -> None:
        ended.append(pipeline)
        module.layers[0].counts = ended.count(pipeline) > 1

    with pytest.raises(CutError, match="has begun to keep something of its calls"):
        pipelined(
            with_layers(Keeps()), [batch(8) for _ in range(3)], 4, schedule=DOUBLING, layers="layers", between=change
        )


# ------------------------------------------------------------------ what two would bring together


def crossing(tensor: torch.Tensor) -> Crossing:
    return Crossing(RunRecord((), (LiveTensor(0, TensorSpec.of(tensor), False, False),)), {0: tensor})


def joined(one: torch.Tensor, other: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
    found = both_together([crossing(one), crossing(other)], sizes)
    assert found is not None
    return found.tensors[0]


def test_samples_are_put_behind_each_other() -> None:
    assert joined(torch.zeros(2, 3), torch.ones(1, 3), (2, 1)).tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3]


def test_what_is_the_same_for_both_stays() -> None:
    table = torch.arange(5.0)
    assert joined(table, table.clone(), (2, 3)).tolist() == table.tolist()


@pytest.mark.parametrize(
    "pair",
    [
        (torch.tensor([0, 1]), torch.tensor([0, 1])),  # positions
        (torch.tensor([1.0]), torch.tensor([2.0])),  # what is one for all samples
        (torch.zeros(4, 3), torch.ones(4, 3)),  # several elements per sample
        (torch.zeros(3, 2), torch.ones(3, 2)),  # samples along another dimension
        (torch.zeros(3, 2).t(), torch.ones(3, 2).t()),  # samples between each other in memory
    ],
)
def test_other_tensors_cannot_be_put_together(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(UnlikeError):
        joined(*pair, (2, 2))


def test_the_record_has_the_shapes_of_both() -> None:
    pair = [torch.full((size, 2, 3), float(size)).transpose(1, 2) for size in (2, 1)]
    found = both_together([crossing(each) for each in pair], (2, 1))
    assert found is not None
    assert found.path.entries[0].spec == TensorSpec((3, 3, 2), torch.float64, (6, 1, 3))
    assert found.tensors[0].stride() == (6, 1, 3)
