"""Steps of every shape give the numbers of one device, or raise: never a wrong number."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_pipe.errors import ConfigurationError, CutError, PartitionError
from tests.support.engine_runs import assert_close, assert_same, pipelined, single_device

WIDTH = 6

pytestmark = pytest.mark.usefixtures("float64")


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """Four blocks with an embedding before and a head behind them; subclasses change ``body``."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(self.head(self.body(self.embed(x), x)), y)

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return h


def batch(samples: int = 7, width: int = WIDTH) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, width), "y": torch.randn(samples, 1)}


def batches(count: int = 3) -> list[dict[str, Tensor]]:
    return [batch() for _ in range(count)]


RUNS = [
    {"ranks": 2},
    {"ranks": 4, "schedule": "gpipe"},
    {"ranks": 2, "schedule": "interleaved"},
    {"ranks": 1, "stages": 4},
]


@pytest.fixture(params=RUNS, ids=lambda run: "-".join(map(str, run.values())))
def run(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"layers": "layers", **request.param}


class InPlaceBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.linear(torch.sin(x))  # type: ignore[no-any-return]


class DictBlock(Block):
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        return {
            "h": super().forward(state["h"]),
            "count": state["count"] + 1,
            "ids": state["ids"].roll(1, 0) if state["ids"] is not None else torch.arange(len(state["h"])),
            "none": None,
            "text": "kept",
        }


class TransposingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).t().contiguous().t()


class InPlace(Net):
    """The input of a layer changes in place, and the batch with it; the batch is the target as well."""

    block = InPlaceBlock

    def forward(self, x: Tensor, y: Tensor) -> Any:
        x = x * 1.0
        h = x
        for layer in self.layers:
            h = layer(h)
        return F.mse_loss(h, x) + F.mse_loss(self.head(h), y)


class Dictionaries(Net):
    block = DictBlock

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"h": h, "count": 0, "ids": None}
        for layer in self.layers:
            state = layer(state)
        assert (state["count"], state["text"], state["none"]) == (4, "kept", None)
        return state["h"][state["ids"]]


class NonContiguous(Net):
    block = TransposingBlock


class Assembled(Net):
    """A buffer of the step's own is filled with derived values before the layers."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        tokens = torch.zeros(len(x), WIDTH)
        tokens[:, :3] = h[:, :3]
        tokens += 0.1
        return super().body(tokens, x)


class FilledThroughViews(Net):
    """The same through views of it, and what is filled is needed after the layers."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        tokens, more = torch.zeros(len(x), WIDTH), torch.ones(len(x), WIDTH)
        tokens[:, :3].copy_(h[:, :3])
        tokens.view(-1)[3:WIDTH] = h[0, 3:]
        for row in range(len(x)):
            more[row].mul_(h.mean(0))
        return super().body(h, x) * tokens + more


class FilledByFunctions(Net):
    """Functions write into tensors of the step's own that are not their first argument."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        largest, index = torch.zeros(len(x), 2), torch.zeros(len(x), dtype=torch.long)
        own, table = torch.zeros(len(x), WIDTH), torch.ones(WIDTH, WIDTH)
        torch.max(h.detach(), 1, out=(largest[:, 1], index))
        torch._foreach_add_([own[:]], [h.detach()])
        h = h + F.embedding(index, table, max_norm=0.5)
        return super().body(h, x) * own + largest[:, 1:] * index[:, None] + table.mean(0)


class OwnStatistics(Net):
    """Running statistics of the step's own."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        mean, var = torch.zeros(WIDTH), torch.ones(WIDTH)
        h = F.batch_norm(h, mean, var, None, None, True)
        return super().body(h, x) * var + mean


class ViewChangedByLayer(Net):
    """The first layer changes a view of the batch in place, and of a tensor of the step's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = InPlaceBlock()
        self.layers[1] = InPlaceBlock()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        own = torch.ones(len(x), 2, WIDTH)
        h = self.layers[0](x[:]) + self.layers[1](own[:, 1])
        for layer in self.layers[2:]:
            h = layer(h)
        return F.mse_loss(self.head(h * own.sum(1)), y) + F.mse_loss(h, x)


class Carried(Net):
    """The input of the first layer is needed after the last one, and a list of all states between them."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        states = [h]
        for layer in self.layers:
            states.append(layer(sum(states) / len(states)))
        return torch.stack(states).mean(0) + h * x


class Scaled(Net):
    """One parameter used before, between and after the layers, and a norm shared by all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(5))
        self.norm = nn.LayerNorm(WIDTH)

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        h = h * self.scale[4]
        for number, layer in enumerate(self.layers):
            h = h + self.scale[number] * layer(self.norm(h))
        return self.norm(h) * self.scale[4]


class KnownPath(Net):
    """The path depends on values of the batch, which every rank knows."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if x[0, number] > 0:
                h = h + 1
            h = layer(h)
        return h if x[0, 0] > 0 else h * 2


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class CustomFunction(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(Square.apply(h))
        return h


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.layers[0].requires_grad_(False)
        self.layers[1].requires_grad_(False)


class NoGradPrefix(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.layers[:2]:
                h = layer(h)
        for layer in self.layers[2:]:
            h = layer(h)
        return h


class Checkpointed(Net):
    reentrant = False

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=self.reentrant)
        return h


class ReentrantCheckpointed(Checkpointed):
    reentrant = True


class CheckpointedTogether(Net):
    """One checkpoint around several layers, and a cut inside."""

    reentrant = False

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        return checkpoint(super().body, h, x, use_reentrant=self.reentrant)


class ReentrantTogether(CheckpointedTogether):
    reentrant = True


class NestedCheckpoints(Checkpointed):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return checkpoint(super().forward, x, y, use_reentrant=False)


class Distributions(Net):
    """torch.distributions looks at the values that it is given."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        h = self.layers[0](h)
        known = torch.distributions.Normal(h, h.exp(), validate_args=True)
        for layer in list(self.layers)[1:]:
            h = layer(h + known.stddev)
        return h + torch.distributions.kl_divergence(known, torch.distributions.Normal(0.0, torch.ones_like(h)))


class SharedByLayers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].linear.weight = self.layers[0].linear.weight


class TiedEnds(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        return F.linear(super().body(h, x), self.embed.weight.t())


class UnusedParameter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class CastByAutocast(Net):
    """Autocast chooses the type of what is computed outside layers; code that looks at it takes another path."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                mixed = h.float() @ self.weight.float()
                bias = torch.full((), 1.0, dtype=mixed.dtype) / 3.0  # no stage gets it from another
                h = layer(h + mixed.double()) + (mixed * (bias if mixed.dtype == torch.bfloat16 else 0.0)).double()
        return h


class CopiesAndSearches(Net):
    """Copies what it has by Python's means, and looks for values that are as many as there are."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            rows, columns = torch.where(h > 0)
            h = layer(h) + 0.1 * copy.deepcopy(h.detach()) + 0.1 * h[rows, columns].sum() + len(rows)
        return h


class ReturnsDictionary(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.body(self.embed(x), x)
        return {"loss": F.mse_loss(self.head(h), y), "hidden": h}


class ViewsAndChunks(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        left, right = h.chunk(2, dim=1)
        flat = h.view(-1)
        for layer in self.layers:
            h = layer(torch.cat([left, right], 1) + flat.view_as(h) + h)
        return h * left.sum() + flat.view_as(h)


class KeepsState(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        self.kept = [h]
        for layer in self.layers:
            h = layer(h)
            self.kept.append(h)
        result = sum(self.kept)
        self.kept = []
        return result


class TakesBatchApart(Net):
    """The step changes its batch: the tensors in place, and the container."""

    def forward(self, *, parts: dict[str, Tensor]) -> Any:  # type: ignore[override]
        x, y = parts.pop("x"), parts.pop("y")
        x -= x.mean(0)
        return super().forward(x, y)


EXACT = [
    Net, InPlace, Dictionaries, NonContiguous, Assembled, Carried, Scaled, KnownPath, CustomFunction, Frozen,
    FilledThroughViews, FilledByFunctions, OwnStatistics, ViewChangedByLayer, NoGradPrefix, Checkpointed,
    ReentrantCheckpointed, CheckpointedTogether, Distributions, SharedByLayers, TiedEnds, UnusedParameter,
    ReturnsDictionary, ViewsAndChunks, KeepsState, CastByAutocast, CopiesAndSearches,
]  # fmt: skip


@pytest.mark.parametrize("model", EXACT, ids=lambda model: model.__name__)
def test_equals_one_device(model: type[Net], run: dict[str, Any]) -> None:
    assert_same(model(), batches(), **run)


def test_a_step_may_take_its_batch_apart(run: dict[str, Any]) -> None:
    model, data = TakesBatchApart(), [batch(6) for _ in range(3)]
    shifted = [{"x": d["x"] - d["x"].mean(0), "y": d["y"]} for d in data]
    plain = Net()
    plain.load_state_dict(model.state_dict())
    whole = single_device(plain, shifted, 1)
    found = pipelined(model, data, 1, call=lambda module, part: module(parts=part), **run)
    assert found.losses == pytest.approx(whole.losses, abs=1e-12)


def test_shapes_may_change_from_batch_to_batch(run: dict[str, Any]) -> None:
    sizes = [7, 7, 2, 7, 1, 2, 9]
    assert_same(Carried(), [batch(samples) for samples in sizes], micro_batches=4, **run)


def test_weight_decay_leaves_parameters_without_gradient_alone(run: dict[str, Any]) -> None:
    def decaying(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5, eps=1e-2)

    assert_same(UnusedParameter(), batches(), optimizer=decaying, **run)


class Fickle(Block):
    """Leaves something else behind from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = super().forward(x)
        kinds = [out.mT.contiguous().mT + 0, x, x.view_as(x), out.detach(), out.float(), out[:, :1] + 0]
        return out if self.calls % 2 else kinds[self.calls // 2 % len(kinds)]


class Looks(Net):
    """Code between layers that depends on what kind of tensor they return."""

    block = Fickle

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        seen = 0.0
        for layer in self.layers:
            out = layer(h)
            seen += (out is h) + 2 * out.requires_grad + 4 * out.is_contiguous() + 8 * out.shape[1] + out.itemsize / 64
            h = 0.3 * (out + x.to(out.dtype) + h)
        return h * seen / 200  # where the last layer is: what the others left must have looked the same


@pytest.mark.parametrize("run", [{"ranks": 2}, {"ranks": 4, "schedule": "gpipe"}, {"ranks": 1, "stages": 1}])
def test_a_layer_may_return_another_kind_of_tensor_every_time(run: dict[str, Any]) -> None:
    assert_same(Looks(), [batch(6) for _ in range(6)], **run)


class ResidualInput(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h) + x
        return h


def test_batches_may_require_gradients(run: dict[str, Any]) -> None:
    parts = batches()
    for part in parts:
        part["x"].requires_grad_()
    assert_same(ResidualInput(), parts, **run)


def test_batches_that_are_computed_from_parameters_raise() -> None:
    parts = batches(1)
    parts[0]["x"] = nn.Linear(WIDTH, WIDTH)(parts[0]["x"])
    with pytest.raises(CutError, match=r"tensor \(4, 6\) of the batch is computed from parameters before the step"):
        pipelined(ResidualInput(), parts, 2, layers="layers")


def test_only_what_is_used_travels_after_the_first_batch() -> None:
    sent: list[int] = []

    def note(pipeline: Any, module: nn.Module) -> None:
        if pipeline.transport.rank == 0:
            sent.append(pipeline.executor.sent_bytes)

    pipelined(ViewsAndChunks(), batches(), 1, ranks=2, layers="layers", between=note)
    pipelined(Net(), batches(), 1, ranks=2, layers="layers", between=note)
    one_tensor = 7 * WIDTH * 8
    assert sent[0] == sent[3] == 0, "the first batch goes over the slow path"
    assert sent[4] - sent[3] == pytest.approx(one_tensor, abs=64), "a plain chain sends one tensor"


def test_evaluation_between_batches_changes_nothing(run: dict[str, Any]) -> None:
    extra = batch(5)

    def evaluate(pipeline: Any, module: nn.Module) -> None:
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                results = pipeline.evaluate(lambda _, part: module(**part), [extra])
                assert bool(results) == pipeline.is_loss_rank

    assert_same(Carried(), batches(), between=evaluate, **run)


class OwnChangedByLayer(Net):
    """The second layer changes a tensor of the step's own in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = InPlaceBlock()

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        own = torch.ones(len(x), WIDTH)
        h = self.layers[0](h) + self.layers[1](own)
        for layer in self.layers[2:]:
            h = layer(h)
        return h * own


class BatchChangedByLayer(Net):
    """The first layer changes the batch in place, which is the target as well."""

    block = InPlaceBlock

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.mse_loss(self.head(self.body(x, x)), y) + F.mse_loss(x, y)


class Conjugates(Net):
    """What crosses the cuts is conjugated and negated by a mark alone, not in memory."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.complex(x.real, super().forward(x.real + x.imag)).conj()

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        h = torch.complex(h, x)
        first = h.conj().imag
        return super().body(h, x).imag + first


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "model", [OwnChangedByLayer, BatchChangedByLayer, FilledThroughViews, ViewsAndChunks, Conjugates]
)
def test_evaluation_gives_the_loss_of_one_device(model: type[Net], context: Any, run: dict[str, Any]) -> None:
    net, data = model(), batch(5)
    losses: list[float] = []

    def evaluate(pipeline: Any, module: nn.Module) -> None:
        with context():
            losses.extend(map(float, pipeline.evaluate(lambda _, part: module(**part), [data]).values()))

    pipelined(net, batches(1), 1, between=evaluate, optimizer=lambda ps, lr: torch.optim.SGD(ps, lr=0.0), **run)
    with torch.no_grad():
        assert losses == pytest.approx([float(net(**data))], abs=1e-12)


class Pickles(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
            pickle.dumps(h)
        return h


class Penalty(Net):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x, y) + sum(p.pow(2).sum() for p in self.parameters())


class Twice(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        return super().body(super().body(h, x), x)


class Skips(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            h = layer(h)
        return h


class SharedMemoryChanged(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        row = h[0]
        for layer in self.layers:
            h = layer(h) + h
        row.add_(1)
        return h + row


@pytest.mark.parametrize("ranks", [2, 4])
def test_memory_shared_at_an_earlier_cut_counts_at_later_ones(ranks: int) -> None:
    """Both come to the second stage as copies, and from there to the last one."""
    with pytest.raises(CutError, match="shares its memory"):
        pipelined(SharedMemoryChanged(), batches(), 2, ranks=ranks, layers="layers")


class AliasChanged(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        tokens = torch.zeros(len(x), WIDTH)
        alias = tokens.detach()
        tokens += h.detach()
        return super().body(h, x) + alias


class Takes(Net):
    """A tensor of the step's own takes the memory of an activation, in one of the ways that torch has."""

    def take(self, own: Tensor, h: Tensor) -> None:
        own.set_(h)

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        own = torch.zeros(len(x), WIDTH)
        for layer in self.layers:
            h = layer(h)
            self.take(own, h.detach())
        return h * own


class TakesStorage(Takes):
    def take(self, own: Tensor, h: Tensor) -> None:
        own.set_(h.untyped_storage(), 0, h.shape, h.stride())


class Gives(Takes):
    def take(self, own: Tensor, h: Tensor) -> None:
        h.set_(own)
        own.add_(1)


class WritesInVmap(Takes):
    def take(self, own: Tensor, h: Tensor) -> None:
        torch.vmap(lambda to, what: to.add_(what))(own, h)


class Flattened(Net):
    """A layer returns a view of the batch, which is changed in place by the next layer, or after all."""

    changing = 1

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(0, nn.Unflatten(1, (2, 3)))
        self.layers[self.changing] = InPlaceBlock()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        flat = h = self.layers[0](x).flatten(1)
        for layer in self.layers[1:4]:
            h = layer(h)
        return F.mse_loss(self.layers[4](flat) + h, x)


class FlattenedChangedLater(Flattened):
    changing = 4


class FunctionalNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        return super().body(F.batch_norm(h, self.mean, self.var, training=True), x)


class InsideGrad(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.func.grad(lambda t: super(InsideGrad, self).body(t, x).sum())(h)


class InsideVmap(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.vmap(lambda t: super(InsideVmap, self).body(t, x))(h)


class InsideForwardMode(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            out = super().body(torch.autograd.forward_ad.make_dual(h, torch.ones_like(h)), x)
            return torch.autograd.forward_ad.unpack_dual(out).primal


class Special(Tensor):
    """What is added to it counts twice."""

    def __add__(self, other: Any) -> Any:
        return torch.add(self, other, alpha=2)


class KeepsSubclass(Net):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).as_subclass(Special)

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        first = h = self.layers[0](h)
        for layer in self.layers[1:]:
            h = layer(h)
        return first + h


class KeepsSparse(Net):
    def body(self, h: Tensor, x: Tensor) -> Tensor:
        first = h.to_sparse()
        return first.to_dense() + super().body(h, x)


class OpaqueResult(Net):
    class block(Block):
        def forward(self, x: Any) -> Any:
            return Box(super().forward(x.value if isinstance(x, Box) else x))

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return h.value  # type: ignore[attr-defined,no-any-return]


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Pickles, "pickling needs the value of a tensor that only another stage has"),
        (Penalty, r"'layers.0.linear.weight' is used on rank"),
        (Twice, "called a second time"),
        (AliasChanged, "and another tensor shares its memory"),
        (Takes, "'set_' changes a tensor in place, with or for one that only another stage has"),
        (TakesStorage, "'untyped_storage' asks for memory that only another stage has"),
        (Gives, "'set_' changes a tensor in place"),
        (WritesInVmap, "'add_' changes a tensor in place"),
        (FunctionalNorm, "'batch_norm' changes 'mean' in place before this stage's layers"),
        (Flattened, "an argument of the layer that returned it shares its memory"),
        (FlattenedChangedLater, "another tensor that crosses the cut shares its memory"),
        (ReentrantTogether, r"before layer 'layers\.2' lies inside a checkpoint with use_reentrant=True"),
        (NestedCheckpoints, "surrounds layers and is inside another"),
        (InsideGrad, "lies inside a transform of torch.func"),
        (InsideVmap, "lies inside a transform of torch.func"),
        (InsideForwardMode, "or inside forward-mode differentiation"),
        (KeepsSubclass, r"a Special with torch\.strided crosses the cut before layer 'layers\.2'"),
        (KeepsSparse, r"a Tensor with torch\.sparse_coo crosses the cut before layer 'layers\.2'"),
        (OpaqueResult, "cannot be shown to the next stages"),
    ],
)
def test_what_cannot_be_served_raises(model: type[Net], message: str) -> None:
    with pytest.raises(CutError, match=message):
        pipelined(model(), batches(), 2, ranks=2, layers="layers")


class Detached(Net):
    """The loss of a micro-batch depends on the parameters if its first target is positive."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        loss = super().forward(x, y)
        return loss if y[0] > 0 else loss.detach()


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_batch_without_gradients_raises_as_on_one_device(recompute: str) -> None:
    data = batch(6)
    with pytest.raises(ConfigurationError, match="depends on no parameter that is trained"):
        pipelined(Detached(), [{**data, "y": -data["y"].abs()}], 3, layers="layers", recompute=recompute)
    data["y"] = data["y"].abs()
    data["y"][2:4] *= -1
    expected = copy.deepcopy(net := Detached())
    for part in (0, 4):
        (expected(**{name: value[part : part + 2] for name, value in data.items()}) / 3).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    found = pipelined(net, [data], 3, layers="layers", recompute=recompute)
    assert_close(found.values, expected.state_dict(), 1e-12)


def test_a_layer_that_is_never_called_raises() -> None:
    with pytest.raises((PartitionError, CutError), match=r"layers\.3"):
        pipelined(Skips(), batches(), 2, ranks=2, layers="layers")


@pytest.mark.parametrize("model", [InsideGrad, InsideVmap, InsideForwardMode])
def test_transforms_on_one_rank(model: type[Net]) -> None:
    assert_same(model(), batches(), ranks=1, layers="layers")


class Sometimes(Net):
    """Needs a tensor from before the cut only if the batch says so; the shapes never tell."""

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        first = h
        h = super().body(h, x)
        return h + first if x[0, 0] > 0 else h


def test_a_tensor_that_was_not_sent_is_missed() -> None:
    quiet, loud = batch(2), batch(2)
    quiet["x"][:, 0], loud["x"][:, 0] = -1, 1
    with pytest.raises(CutError, match="did not send"):
        pipelined(Sometimes(), [quiet, quiet, loud], 1, ranks=2, layers="layers")


class Noisy(Net):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.3, self.training)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        x = x + torch.randn_like(x)
        h = F.dropout(self.embed(x), 0.2)
        noise = torch.rand(WIDTH)
        h = self.body(h, x) + torch.rand(WIDTH) * noise
        return F.mse_loss(self.head(F.dropout(h, 0.5)), y)


def test_random_numbers_do_not_depend_on_the_cut() -> None:
    data = batches()
    # Threads share torch's generator: one rank at a time.
    model = Noisy()
    found = [pipelined(model, data, 3, ranks=1, stages=stages, layers="layers").losses for stages in (1, 2, 4)]
    assert found[0] == pytest.approx(found[1], abs=1e-12)
    assert found[0] == pytest.approx(found[2], abs=1e-12)
    assert found[0] != pytest.approx(single_device(model, data, 3).losses, abs=1e-6)


class NoisyCheckpoints(Noisy):
    """Draws in layers, in an outside module and between them; once more if checkpoints run again."""

    reentrant: bool | None = None

    def noisy(self, layer: nn.Module, h: Tensor) -> Tensor:
        return F.dropout(layer(h), 0.4) + torch.rand(WIDTH) * torch.randn(WIDTH).bernoulli_(0.5)

    def body(self, h: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                h = self.noisy(layer, h)
            else:
                h = checkpoint(self.noisy, layer, h, use_reentrant=self.reentrant)
        return h


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_layers_draw_the_same_numbers_again(reentrant: bool) -> None:
    data, model = batches(), NoisyCheckpoints()
    expected = pipelined(model, data, 3, ranks=1, stages=2, layers="layers")
    model.reentrant = reentrant
    found = pipelined(model, data, 3, ranks=1, stages=2, layers="layers")
    assert found.losses == pytest.approx(expected.losses, abs=1e-12)
    assert_close(found.values, expected.values, 1e-12)


def test_nothing_stays_patched() -> None:
    outcome = pipelined(Net(), batches(1), 2, ranks=2, layers="layers")
    for pipeline in outcome.pipelines:
        assert not any({"forward", "_apply"} & module.__dict__.keys() for module in pipeline.module.modules())


@pytest.mark.parametrize(("schedule", "peaks"), [("gpipe", [6, 6, 6, 6]), ("1f1b", [4, 3, 2, 1])])
def test_activations_held_are_those_of_the_schedule(schedule: str, peaks: list[int]) -> None:
    outcome = pipelined(Net(), [batch(6)] * 2, 6, ranks=4, schedule=schedule, layers="layers")
    found = {pipeline.transport.rank: pipeline.executor.peak_held for pipeline in outcome.pipelines}
    assert [found[rank] for rank in range(4)] == peaks


class Tanh(nn.Module):
    """A layer with a hook of every kind that may change something."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
        self.register_forward_hook(lambda module, args, result: result.tanh())
        self.register_full_backward_hook(
            lambda module, inputs, outputs: tuple(g if g is None else 0.9 * g for g in inputs)
        )
        self.register_full_backward_pre_hook(lambda module, outputs: (0.8 * outputs[0],))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Hooked(nn.Module):
    """Hooks on layers and on an outside module; what goes into a layer is used after it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Tanh()
        self.layers = nn.ModuleList(Tanh() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble", "chimera"])
def test_hooks_of_layers_run_where_the_layers_do(schedule: str, recompute: str) -> None:
    data = [{"x": torch.randn(size, 8)} for size in (6, 6, 5)]
    assert_same(Hooked(), data, schedule=schedule, recompute=recompute, layers="layers")


class Accumulates(nn.Module):
    """Every layer changes in place a tensor that came in one message with its other input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adding() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x, total)
        return (x * total).square().mean()


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        total.add_(x.detach())
        return torch.tanh(self.linear(x))


def test_tensors_out_of_one_message_do_not_count_as_views_of_each_other() -> None:
    data = [{"x": torch.randn(size, 8)} for size in (6, 6, 5)]
    assert_same(Accumulates(), data, schedule="interleaved", layers="layers")


class LeavesOut(Net):
    """An evaluation calls no layers, or some, as the batch says by its first entry."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if self.training:
            return super().forward(x, y)
        kind = int(x[0, 0])
        if kind == 0:
            return torch.ones(())
        if kind == 1:
            return {"loss": y.mean(), "seen": len(x)}
        h = self.embed(x)
        for layer in self.layers[: kind - 2]:
            h = layer(h) + x
        return {"loss": h.sum(), "hidden": h} if kind % 2 else h.mean()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_may_leave_layers_out(context: Any, run: dict[str, Any]) -> None:
    net, found, expected = LeavesOut(), [], []
    parts = [batch(5) for _ in range(9)]
    for kind, part in zip((0, 1, 2, 6, 4, 3, 1, 5, 0), parts, strict=True):
        part["x"][0, 0] = kind

    def evaluate(pipeline: Any, module: nn.Module) -> None:
        module.eval()
        for part in parts:
            with context():
                found.extend(pipeline.evaluate(lambda _, part: module(**part), [part]).values())
        module.train()

    assert_same(net, batches(2), optimizer=lambda ps, lr: torch.optim.SGD(ps, lr=0.0), between=evaluate, **run)
    net.eval()
    with torch.no_grad():
        expected = 2 * [net(**part) for part in parts]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)


class EndsByRank(Net):
    """One rank leaves its evaluation early."""

    ends = False

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return x.mean() if self.ends and not self.training else super().forward(x, y)


@pytest.mark.parametrize("ending", [0, 1])
def test_all_ranks_must_leave_the_same_layers_out(ending: int) -> None:
    def evaluate(pipeline: Any, module: Any) -> None:
        module.ends = pipeline.transport.rank == ending
        module.eval()
        pipeline.evaluate(lambda _, part: module(**part), [batch(5)])

    with pytest.raises(CutError, match=r"the previous stage made 'the end of the step'|before layer 'layers\.2'"):
        pipelined(EndsByRank(), batches(1), 1, between=evaluate, ranks=2, layers="layers")
