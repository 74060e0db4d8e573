"""Training steps that run the layers several times: the loss and gradients of one device that accumulates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pipe.errors import CutError, PartitionError
from lightning_pipe.partition import find_layers
from tests.support.engine_runs import assert_close, assert_same, pipelined, single_device
from tests.support.pairs import pairs, slow_but
from tests.support.small_net import RUNS, WIDTH, Block, Net, batch, batches

pytestmark = pytest.mark.usefixtures("float64")


class Siamese(Net):
    """Two passes that do not need each other, each with an embedding and a head."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        one, other = (self.head(self.body(self.embed(view), x)) for view in (x, x.flip(1)))
        return F.mse_loss(one, other) + F.mse_loss(one, y)


class Recursion(Net):
    """Three passes, each over what the one before gave."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.embed(x)
        for _ in range(3):
            h = self.body(h, x) + h * x
        return F.mse_loss(self.head(h), y)


class InARow(Net):
    """Every layer is called twice before the next one: that needs no passes."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(layer(h) + h)
        return h


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class Drops(Siamese):
    block = Dropping


class NormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(super().forward(x))  # type: ignore[no-any-return]


class Contrasts(Net):
    """Two views of a sample through residual blocks with batch norm; each view must know the other."""

    block = NormBlock

    def forward(self, x: Tensor, y: Tensor) -> Any:
        one, other = (F.normalize(self.body(self.embed(view), x), dim=1) for view in (x, x * 0.9 + 0.1))
        scores = one @ other.T / 0.5
        return F.cross_entropy(scores, torch.arange(len(x))) + 0.0 * self.head(one).sum()


@pytest.fixture(params=slow_but([*RUNS, {"ranks": 4}], RUNS[2]), ids=lambda run: "-".join(map(str, run.values())))
def run(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"layers": "layers", **request.param}


@pytest.mark.parametrize(("model", "passes"), [(Siamese, 2), (Recursion, 3)])
def test_several_passes_equal_one_device(model: type[Net], passes: int, run: dict[str, Any]) -> None:
    assert_same(model(), batches(2), 4, passes=passes, **run)


def test_layers_called_in_a_row_need_no_passes(run: dict[str, Any]) -> None:
    assert_same(InARow(), batches(2), 3, **run)


def test_passes_that_run_again_equal_one_device() -> None:
    assert_same(Siamese(), batches(2), 4, passes=2, layers="layers", schedule="gpipe", recompute="always")


def test_one_pass_too_few_raises() -> None:
    with pytest.raises(CutError, match=r"the step returned before layer 'layers\.0' was called"):
        pipelined(Net(), batches(1), 2, passes=2, layers="layers")


def test_masks_do_not_depend_on_the_division() -> None:
    net, data = Drops(), batches(2)
    alone = pipelined(net, data, 2, ranks=1, layers="layers")
    found = pipelined(net, data, 2, ranks=1, stages=4, passes=2, layers="layers")
    assert found.losses == pytest.approx(alone.losses, abs=1e-12)
    assert_close(found.values, alone.values, 1e-12)


def test_contrast_with_batch_norm_equals_one_device() -> None:
    """The gradients are those of one device; so are the statistics, which one device updates once for each pass."""
    net, data = Contrasts(), [batch(8), batch(8)]
    expected = single_device(net, data, 2)
    alone = pipelined(net, data, 2, ranks=1, layers="layers", deferred_batch_norm=True)
    found = pipelined(net, data, 2, ranks=4, schedule="gpipe", layers="layers", passes=2, deferred_batch_norm=True)
    assert found.losses == pytest.approx(expected.losses, abs=1e-12)
    assert_close(found.values, alone.values, 1e-12)
    weights = {name: value for name, value in expected.values.items() if "running" not in name}
    weights = {name: value for name, value in weights.items() if "tracked" not in name}
    assert_close({name: found.values[name] for name in weights}, weights, 1e-9)


class Pairs(nn.Module):
    """Two texts through one BERT."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
        self.net = transformers.BertModel(transformers.BertConfig(vocab_size=31, **QUIET, **sizes))

    def forward(self, one: Tensor, other: Tensor, y: Tensor) -> Any:
        left, right = (self.net(input_ids=ids).last_hidden_state.mean(1) for ids in (one, other))
        return F.cosine_embedding_loss(left, right, y, margin=0.5)


class Albert(nn.Module):
    """Groups of layers that have several depths in common."""

    def __init__(self, **options: int) -> None:
        super().__init__()
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "embedding_size": 4}
        config = transformers.AlbertConfig(vocab_size=31, **QUIET, **sizes, **options)  # type: ignore[arg-type]
        self.net = transformers.AlbertForMaskedLM(config)

    def forward(self, ids: Tensor) -> Any:
        return self.net(input_ids=ids, labels=ids).loss


QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SCHEDULES = [
    {"ranks": ranks, "schedule": schedule}
    for ranks in (2, 4)
    for schedule in ("gpipe", "1f1b", "interleaved")
    if (ranks, schedule) != (4, "interleaved")  # four layers
]


def ids() -> Tensor:
    return torch.randint(1, 31, (4, 5))


@pytest.mark.slow  # fast: small nets above and below
@pytest.mark.parametrize("run", SCHEDULES)
def test_two_texts_through_one_bert_equal_one_device(run: dict[str, Any]) -> None:
    data = [{"one": ids(), "other": ids(), "y": torch.tensor([1.0, -1.0, 1.0, -1.0])} for _ in range(2)]
    assert_same(Pairs(), data, 2, passes=2, layers="net.encoder.layer", **run)


@pytest.mark.slow  # fast: small nets above and below
@pytest.mark.parametrize("run", SCHEDULES)
def test_albert_with_several_layers_in_its_group_equals_one_device(run: dict[str, Any]) -> None:
    model = Albert(num_hidden_layers=3, inner_group_num=4)
    layers = "net.albert.encoder.albert_layer_groups.0.albert_layers"
    assert_same(model, [{"ids": ids()} for _ in range(2)], 2, passes=3, layers=layers, **run)


@pytest.mark.slow  # fast: small nets above and below
@pytest.mark.parametrize("run", SCHEDULES)
def test_albert_with_several_groups_equals_one_device(run: dict[str, Any]) -> None:
    model = Albert(num_hidden_layers=8, num_hidden_groups=4)  # each group twice in a row
    layers = "net.albert.encoder.albert_layer_groups"
    assert_same(model, [{"ids": ids()} for _ in range(2)], 2, layers=layers, **run)


class InSequence(nn.Module):
    """A sequence of blocks, of which equal letters are one module."""

    def __init__(self, letters: str, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        blocks = {letter: block() for letter in letters}
        self.net = nn.Sequential(*(blocks[letter] for letter in letters))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(self.net(x).mean(1, keepdim=True), y)


class Residual(nn.Module):
    """A layer with two others inside, which run one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def pair() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


@pytest.mark.parametrize(
    ("letters", "schedule"),
    pairs(["asbs", "sasb", "asab"], ["1f1b", "interleaved"], lambda letters, schedule: letters % 2 == schedule),
)
def test_a_module_at_several_depths_among_others_equals_one_device(letters: str, schedule: str) -> None:
    """It is held wherever it is used, and its gradients are summed."""
    assert_same(InSequence(letters, pair), batches(2), 2, layers="net", ranks=2, schedule=schedule)


@pytest.mark.parametrize(
    ("letters", "block", "remedy"),
    [
        ("ssss", pair, 'layers=["net.0.0", "net.0.1"], passes=4'),
        ("sss", Residual, 'layers=["net.0.first", "net.0.second"], passes=3'),
        ("abab", Residual, 'layers=["net.0", "net.1"], passes=2'),
    ],
)
def test_a_sequence_of_one_module_trains_as_the_error_says(
    letters: str, block: Callable[[], nn.Module], remedy: str
) -> None:
    with pytest.raises(PartitionError, match="nothing but modules that occur several times") as caught:
        find_layers(InSequence(letters, block), "net")
    assert caught.value.hint is not None
    assert remedy in caught.value.hint
    options = eval(f"dict({remedy})")
    assert_same(InSequence(letters, block), batches(2), 2, ranks=2, **options)


@pytest.mark.slow
def test_albert_with_one_layer_equals_one_device() -> None:
    layer = "net.albert.encoder.albert_layer_groups.0.albert_layers.0"
    inside = [f"{layer}.{name}" for name in ("attention", "ffn", "ffn_output")]
    model, data = Albert(num_hidden_layers=4), [{"ids": ids()} for _ in range(2)]
    assert_same(model, data, 2, passes=4, layers=inside, ranks=3, schedule="gpipe")


def test_one_pass_too_many_raises() -> None:
    with pytest.raises(CutError, match="in one pass more than the 2 that were asked for"):
        pipelined(Recursion(), batches(1), 2, passes=2, layers="layers")
