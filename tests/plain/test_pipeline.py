"""A loop of the user's own over a pipeline trains as on one device."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pipe import Pipeline, PipeStrategy
from lightning_pipe.engine import pipeline as engine
from lightning_pipe.errors import CommunicationError, ConfigurationError, CutError, PartitionError
from lightning_pipe.plain.sharing import fingerprint
from lightning_pipe.schedules import Chimera
from tests.support.processes import in_turn, outcomes, run_world

SECONDS = 60
UNCOMPARED: dict[str, Any] = {"layers": "blocks", "compare_losses": False}
"""Of tests that are about something else than losses."""
pytestmark = pytest.mark.timeout(SECONDS + 15)
TOLERANCE = 1e-9


class Net(nn.Module):
    """Blocks between two parts outside, the second of which uses the weights of the first; and a counter."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        middle = (lambda: nn.BatchNorm1d(8)) if norm else nn.Tanh
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), middle(), nn.Dropout(dropout)) for _ in range(4))
        self.seen = 0
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return h @ self.embed.weight

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Changes attributes of the model, as steps do."""
        x, y = batch
        self.seen += 1
        self.sizes.append(len(x))
        return nn.functional.mse_loss(self(x), y)


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).double()


def batches(number: int = 3, samples: int = 7) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(samples, 6, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(), draw()) for _ in range(number)]


def one_device(
    model: Net, data: list[Any], accumulate: int = 1, clip: float = 0.05
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms of gradients and the state in the end, with batches whole."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for number, batch in enumerate(data, start=1):
        loss = model.loss(batch)
        loss.backward()
        losses.append(loss.item())
        if number % accumulate == 0:
            norms.append(clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, model.state_dict()


def trained(
    model: Net, pipeline: Pipeline, data: list[Any], accumulate: int = 1, clip: float = 0.05
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same over a pipeline."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for number, batch in enumerate(data, start=1):
        losses.append(pipeline.train(model.loss, batch).item())
        if number % accumulate == 0:
            norms.append(pipeline.clip_grad_norm_(clip).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, pipeline.state_dict()


def assert_same(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found[:2], expected[:2], strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=TOLERANCE)
    assert list(found[2]) == list(expected[2])
    for name, value in expected[2].items():
        error = (found[2][name] - value).abs().max().item()
        assert error <= TOLERANCE, f"{name} is off by {error}"


def on_ranks(process: int, options: dict[str, Any], accumulate: int = 1) -> Any:
    model = net()
    pipeline = Pipeline(model, layers="blocks", micro_batches=3, **options)
    found = trained(model, pipeline, batches(4), accumulate)
    return found, pipeline.evaluate(lambda batch: model(batch[0]), batches(11)), model.sizes


CALLS: dict[str, Any] = {}
"""What tests look at: loops of the same two processes."""
Found = dict[str, list[Any]]


@pytest.fixture(scope="module")
def found() -> Found:
    return in_turn(CALLS, 2, run=run_world)


def losses_with(scaling: Any, dropout: float) -> list[float]:
    model = net(dropout=dropout)
    pipeline = Pipeline(model, **UNCOMPARED, micro_batches=4, schedule=Chimera(scaling=scaling))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for batch in batches(3, samples=11):
        losses.append(pipeline.train(lambda part: nn.functional.mse_loss(model(part[0]), part[1]), batch).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def both_scalings(process: int, dropout: float) -> list[list[float]]:
    return [losses_with(scaling, dropout) for scaling in ("direct", "forward_doubling")]


for dropout in (0.0, 0.2):
    CALLS[f"dropout {dropout}"] = partial(both_scalings, dropout=dropout)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_forward_doubling_changes_no_numbers(dropout: float, found: Found) -> None:
    """Random numbers of a micro-batch are the same in all schedules; without them losses are those of one device."""
    alone = one_device(net(), batches(3, samples=11), clip=math.inf)[0]
    for direct, doubled in found[f"dropout {dropout}"]:
        assert doubled == pytest.approx(direct if dropout else alone, rel=TOLERANCE)


CALLS["accumulate"] = partial(on_ranks, options={}, accumulate=2)


def test_two_processes_train_as_one_device(found: Found) -> None:
    expected, model = net(), net()
    losses = one_device(expected, batches(4), accumulate=2)
    with torch.no_grad():
        outputs = [expected(x) for x, _ in batches(11)]
    for trained, own, sizes in found["accumulate"]:
        assert_same(trained, losses)
        for ours, theirs in zip(own, outputs, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)
        assert sizes == [3, 2, 2] * 4  # what the step appends is on all ranks, in the order of the micro-batches
        model.load_state_dict(trained[2])


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "interleaved", "stages": 4},
        {"stages": 1},
        pytest.param({"schedule": "gpipe", "stages": 2, "recompute": "always"}, marks=pytest.mark.slow),
        pytest.param({"schedule": "zero_bubble", "stages": 3, "balance": [3, 3, 6]}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_one_process_has_all_stages(options: dict[str, Any]) -> None:
    found, outputs, sizes = on_ranks(0, options)
    model = net()
    assert_same(found, one_device(model, batches(4)))
    assert sizes == [3, 2, 2] * 4
    assert len(outputs) == 11


def replicated(process: int) -> Any:
    model = net()
    pipeline = Pipeline(model, layers="blocks", micro_batches=2, data_parallel_size=2)
    x, y = (torch.cat(each) for each in zip(*batches(4), strict=True))
    data = TensorDataset(x[:26], y[:26])
    sampler = DistributedSampler(
        data, pipeline.data_parallel_size, pipeline.data_parallel_rank, shuffle=False, drop_last=True
    )
    return trained(model, pipeline, list(DataLoader(data, batch_size=5, sampler=sampler)))


@pytest.mark.timeout(120)
def test_replicas_weigh_batches_by_samples() -> None:
    """Replicas with batches of 5, 5 and 3 samples; the last ones of one replica are not dropped."""
    x, y = (torch.cat(each) for each in zip(*batches(4), strict=True))
    whole = [(x[:10], y[:10]), (x[10:20], y[10:20]), (x[20:26], y[20:26])]
    expected = one_device(net(), whole)
    found = run_world(replicated, 4, timeout=100)
    losses = [sum(each) / 2 for each in zip(found[0][0], found[-1][0], strict=True)]
    for _, norms, state in found:
        assert_same((losses, norms, state), expected)


def uneven(process: int) -> Any:
    model = net()
    pipeline = Pipeline(
        model, layers="blocks", stages=2, pipeline_parallel_size=1, data_parallel_size=2, micro_batches=2
    )
    (x, y), start, end = batches(1)[0], *((0, 5) if pipeline.data_parallel_rank == 0 else (5, 7))
    return trained(model, pipeline, [(x[start:end], y[start:end])])[1:]


CALLS["uneven"] = uneven


def test_replicas_of_one_rank_with_batches_of_other_sizes(found: Found) -> None:
    _, norms, state = one_device(net(), batches(1))
    for ours in found["uneven"]:
        assert_same(([], *ours), ([], norms, state))


def loaded_on_one(process: int) -> Any:
    model = net()
    pipeline = Pipeline(model, layers="blocks", micro_batches=3)
    data: list[Any] = batches(3) if process == 1 else [None] * 3
    found = trained(model, pipeline, data)
    return found, pipeline.evaluate(lambda batch: model(batch[0]).sum(), batches(9) if process == 1 else None)


CALLS["loaded on one"] = loaded_on_one


def test_a_batch_is_needed_where_it_is_loaded_alone(found: Found) -> None:
    expected = net()
    losses = one_device(expected, batches(3))
    for ours, outputs in found["loaded on one"]:
        assert_same(ours, losses)
        assert outputs == pytest.approx([expected(x).sum().item() for x, _ in batches(9)])


def scaled(process: int) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # before the division: it refers to the same parameters
    pipeline = Pipeline(model, layers="blocks", stages=2, micro_batches=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    losses, scales = [], []
    for number, (x, y) in enumerate(batches(3)):
        batch = (x * torch.inf, y) if number == 1 else (x, y)
        losses.append(pipeline.train(model.loss, batch, scaler=scaler).item())
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return losses, scales, pipeline.state_dict()


CALLS["scaled"] = scaled


@pytest.mark.filterwarnings("ignore:It was not checked")
def test_a_gradient_scaler_decides_for_all_stages(found: Found) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in (0, 2):
        loss = model.loss(batches(3)[number])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for ours, scales, state in (*found["scaled"], scaled(0)):
        assert scales == [8.0, 4.0, 8.0]
        assert_same(([ours[0], ours[2]], [], state), (losses, [], model.state_dict()))


# ---------------------------------------------------------------------- bad input


def refused(call: Callable[[], Any], match: str) -> None:
    with pytest.raises((ConfigurationError, PartitionError), match=match):
        call()


def test_input_that_cannot_work_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    refused(lambda: Pipeline(model, "pipedream", layers="blocks", stages=2), "leaves batches under way")
    refused(lambda: Pipeline(nn.Linear(2, 2), stages=2), "layer")
    refused(lambda: Pipeline(model, layers="blocks", balance="time"), "has not been measured")
    refused(lambda: Pipeline(model, loss_weight="tokens"), "loss_weight='tokens' is not known")  # type: ignore[arg-type]
    words = nn.Sequential(nn.Embedding(3, 2, scale_grad_by_freq=True), nn.Linear(2, 2))
    refused(lambda: Pipeline(words, stages=2), "'0' has scale_grad_by_freq")
    pipeline = Pipeline(model, layers="blocks", stages=2, micro_batches=2)
    refused(lambda: Pipeline(model, layers="blocks"), "divided over the ranks of a pipeline already")
    refused(lambda: Pipeline(nn.Sequential(model.blocks, nn.Linear(2, 2))), "divided .* already")
    (batch,) = batches(1)
    with torch.no_grad():
        refused(lambda: pipeline.train(model.loss, batch), "gradients are off")
    refused(lambda: pipeline.train(lambda part: [model.loss(part)][1:] or None, batch), "returned None")
    refused(lambda: pipeline.train(lambda part: {"error": model.loss(part)}, batch), "without a loss tensor")
    refused(lambda: pipeline.train(lambda part: model.loss(part).detach(), batch), "no parameter that is trained")
    refused(lambda: pipeline.train(model.loss), "no batch on any rank")
    for call in (pipeline.state_dict, lambda: pipeline.clip_grad_norm_(1.0), lambda: pipeline.evaluate(model.loss, [])):
        refused(
            lambda call=call: pipeline.train(lambda part: (call(), model.loss(part))[1], batch), "in a step of train"
        )
    with pytest.raises(RuntimeError, match=r"missing embed\.weight"):
        pipeline.load_state_dict({name: value for name, value in net().state_dict().items() if "embed" not in name})
    assert pipeline.train(model.loss, batch).item() == pytest.approx(net().loss(batch).item())  # one process goes on
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(lambda: Pipeline(net(), layers="blocks"), "there is no process group")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("micro_batches", value) for value in ("4", None, 2.0, True)),
        *(("layers", value) for value in (3, [3], [nn.Linear(2, 2)])),
        *(("balance", 3), ("loss_weight", 2), ("split_batch", 4), ("passes", "2"), ("passes", 0), ("timeout", 30)),
        ("timeout", None),
    ],
)
def test_options_of_another_kind_are_named(option: str, value: Any) -> None:
    for take in (partial(Pipeline, net(), stages=2), PipeStrategy):
        refused(partial(take, **{option: value}), f"{option}={re.escape(repr(value))}")


def test_what_is_no_module_is_told_so() -> None:
    no_module: Any = [nn.Linear(2, 2)]
    refused(lambda: Pipeline(no_module, stages=2), "Module is needed, not .Linear")


def test_a_model_on_the_meta_device_initialises_itself() -> None:
    with torch.device("meta"):
        model, other = net(), net()
        other.scale = nn.Parameter(torch.ones(1))
    pipeline = Pipeline(model, **UNCOMPARED, stages=2, micro_batches=2)
    (batch,) = batches(1)
    assert pipeline.train(model.loss, batch).isfinite()
    assert all(value.std() > 0 for name, value in pipeline.state_dict().items() if name.endswith("weight"))
    with pytest.raises(CutError, match="nothing initialises 'scale'"):
        Pipeline(other, **UNCOMPARED, stages=2)


def different(process: int) -> Any:
    model = net()
    pipeline = Pipeline(model, **UNCOMPARED, micro_batches=2)
    for _ in range(2):
        try:
            pipeline.train(model.loss, batches(2)[process])
        except ConfigurationError as error:
            told = str(error)
    return told


def test_one_number_may_have_any_stride() -> None:
    assert fingerprint([torch.arange(2)[::2]]) == fingerprint([torch.zeros(1, dtype=torch.long)])


def test_different_batches_in_a_pipeline_are_an_error_and_end_it() -> None:
    for told in run_world(different, 2, timeout=SECONDS):
        assert "train() is called after an error" in told
        assert "Rank 0 and rank 1 have different batches" in told


def failing(process: int) -> None:
    model = net()
    pipeline = Pipeline(model, **UNCOMPARED, micro_batches=2)
    pipeline.train(model.loss, batches(1)[0])

    def step(part: Any) -> Tensor:
        loss = model.loss(part)
        raise ArithmeticError(f"{loss}")

    pipeline.train(step, batches(1)[0])


def test_an_error_on_one_rank_ends_the_others() -> None:
    """The first stage's runs end before the step raises, so that one rank alone has the error."""
    ended = outcomes(failing, 2, timeout=SECONDS, group_timeout=10)
    assert isinstance(ended[0].error, ArithmeticError)
    assert isinstance(ended[1].error, CommunicationError)
    assert ended[1].seconds - ended[0].seconds < 10


def bidirectional(process: int, change: bool) -> float:
    model = net()
    pipeline = Pipeline(model, "chimera", **UNCOMPARED, micro_batches=2)

    def step(part: tuple[Tensor, Tensor]) -> Tensor:
        return model.loss(part) if change else nn.functional.mse_loss(model(part[0]), part[1])

    return float(pipeline.train(step, batches(1)[0]))


CALLS["bidirectional"] = partial(bidirectional, change=False)


def test_a_step_with_several_pipes_changes_no_attribute(found: Found) -> None:
    model = net()
    with pytest.raises(CutError, match="several pipes"):
        run_world(bidirectional, 2, timeout=SECONDS, change=True)
    for loss in found["bidirectional"]:
        assert loss == pytest.approx(nn.functional.mse_loss(model(batches(1)[0][0]), batches(1)[0][1]).item())


REPLICAS = {"stages": 2, "pipeline_parallel_size": 1, "data_parallel_size": 2}


def with_a_head(process: int, head: str, **options: Any) -> str:
    """The loss of a step with parameters that are no part of the model, or what it says of them."""
    model, scale = net(), torch.zeros((), dtype=torch.float64, requires_grad=True)
    linear, frozen, average, model.head = (nn.Linear(6, 1).double() for _ in range(4))
    frozen.requires_grad_(False)
    pipeline = Pipeline(model, **UNCOMPARED, micro_batches=2, **options)

    def step(part: tuple[Tensor, Tensor]) -> Tensor:
        h = model(part[0])
        with torch.no_grad():
            target = average(h)
        loss = (model.head(h) + frozen(h) - target).square().mean() + 0 * nn.Linear(6, 1).double()(h).mean()
        return loss * torch.exp(scale) if head == "number" else linear(h).mean() + loss if head == "module" else loss

    try:
        return f"{pipeline.train(step, batches(1)[0]):.6f}"
    except ConfigurationError as error:
        return str(error)


CALLS["a module outside"] = partial(with_a_head, head="module")
CALLS["a number outside"] = partial(with_a_head, head="number", schedule="chimera")
CALLS["a module outside, replicas"] = partial(with_a_head, head="module", **REPLICAS)
CALLS["none outside"] = partial(with_a_head, head="none", schedule="chimera")


@pytest.mark.parametrize("head", ["a module outside", "a number outside", "a module outside, replicas"])
def test_parameters_outside_the_model_are_not_trained(head: str, found: Found) -> None:
    told = [text for text in found[head] if re.search(r"a parameter \(.*\), which was no part of Net", text)]
    assert len(told) == (1 if head == "a module outside" else 2)  # those that compute with them
    assert all("Put it into the model before" in text for text in told)


def test_what_is_not_trained_may_be_outside_the_model(found: Found) -> None:
    assert found["none outside"] == [with_a_head(0, "none", stages=2)] * 2
    assert with_a_head(0, "module", stages=2)[-1].isdigit()  # one process has all of them


def of_many_kinds(process: int) -> tuple[list[float], int, int]:
    """Each batch has numbers that no other has, of itself and of its samples."""
    model = net()
    pipeline = Pipeline(model, **UNCOMPARED, micro_batches=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for number, (x, y) in enumerate(batches(9)):
        batch = {"x": x, "y": y, "number": number, "samples": [*range(7 * number, 7 * number + 7)]}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "_SIGNATURES", 4)
            losses.append(pipeline.train(lambda part: model.loss((part["x"], part["y"])), batch).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, len(pipeline._engine._signatures), len(pipeline._engine.executor.exchange._plans)


CALLS["many kinds"] = of_many_kinds


def test_kinds_of_batches_are_forgotten(found: Found) -> None:
    expected = one_device(net(), batches(9), clip=math.inf)[0]
    for losses, signatures, plans in found["many kinds"]:
        assert losses == pytest.approx(expected, rel=1e-10)
        assert signatures <= 6
        assert 0 < plans <= 6


def after_it_is_gone(process: int) -> bool:
    model = net()
    pipeline = Pipeline(model, **UNCOMPARED, micro_batches=2)
    pipeline.train(model.loss, batches(1)[0])
    objects = [weakref.ref(model), weakref.ref(pipeline)]
    del model, pipeline
    gc.collect()
    return any(each() is not None for each in objects)


CALLS["gone"] = after_it_is_gone


def test_nothing_is_left_of_a_pipeline_that_is_not_used(found: Found) -> None:
    assert found["gone"] == [False, False]


def with_a_part_replaced(process: int, part: str) -> str:
    model = net()
    pipeline = Pipeline(model, **UNCOMPARED, micro_batches=2, **REPLICAS)
    pipeline.train(model.loss, batches(1)[0])
    if part == "parameter":
        model.embed.bias = nn.Parameter(torch.ones(8, dtype=torch.float64))
    else:
        model.blocks[1][0] = nn.Linear(8, 8).double()
    try:
        return f"{pipeline.train(model.loss, batches(1)[0])}"
    except ConfigurationError as error:
        return str(error)


for part in ("parameter", "module"):
    CALLS[f"a {part} replaced"] = partial(with_a_part_replaced, part=part)


@pytest.mark.parametrize(("part", "name"), [("parameter", "embed.bias"), ("module", "blocks.1.0.weight")])
def test_what_is_replaced_behind_the_division_is_told(part: str, name: str, found: Found) -> None:
    for told in found[f"a {part} replaced"]:
        assert f"'{name}', which was no part of Net when" in told
        assert "Put it into the model before" in told


# ---------------------------------------------------------------------- models and steps of other kinds


def test_what_a_step_returns_beside_the_loss_is_joined() -> None:
    model = net()
    pipeline = Pipeline(model, layers="blocks", stages=2, micro_batches=3)
    x, y = batches(1)[0]
    found = pipeline.train(lambda part: {"loss": model.loss(part), "rows": part[0], "n": part[0].mean()}, (x, y))
    assert torch.equal(found["rows"], x)
    assert found["n"].item() == pytest.approx(x.mean().item())
    assert found["loss"].item() == pytest.approx(net().loss((x, y)).item())


class Counting(nn.Linear):
    """Has extra state, which is where the layer runs."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def counted(process: int) -> list[int]:
    model = nn.Sequential(*(Counting() for _ in range(4))).double()
    pipeline = Pipeline(model, micro_batches=1)
    pipeline.train(lambda part: model(part[0]).mean(), batches(1)[0])
    return [pipeline.state_dict()[f"{layer}._extra_state"] for layer in range(4)]


CALLS["counted"] = counted


def test_the_whole_state_has_what_layers_keep_on_other_ranks(found: Found) -> None:
    assert found["counted"] == [[1] * 4] * 2


class Tagger(Net):
    """Its loss is a mean over tokens, of which samples have different numbers."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())


def labelled(process: int) -> Any:
    torch.manual_seed(0)
    model = Tagger().double()
    data, generator = [], torch.Generator().manual_seed(1)
    for _ in range(3):
        ids, lengths = (torch.randint(6, (7, width), generator=generator) for width in (5, 1))
        labels = ids.masked_fill(torch.arange(5) > lengths, -100)
        data.append((nn.functional.one_hot(ids, 6).double(), labels))
    if process < 0:
        return one_device(model, data)
    return trained(model, Pipeline(model, layers="blocks", micro_batches=3), data)


CALLS["labelled"] = labelled


def test_a_mean_over_labels_needs_no_function(found: Found) -> None:
    for of_process in found["labelled"]:
        assert_same(of_process, labelled(-1))


def test_what_is_not_clear_to_cut_runs_whole_unless_a_number_is_asked_for() -> None:
    """A sum is no mean over samples."""
    batch = batches(1)[0]
    ours, theirs = net(), net()
    step: Any = lambda model, part: model(part[0]).square().sum()  # noqa: E731
    step(theirs, batch).backward()
    pipeline = Pipeline(ours, layers="blocks", stages=2)
    with pytest.warns(UserWarning, match="batches run whole"):
        pipeline.train(partial(step, ours), batch)
    torch.testing.assert_close(ours.embed.weight.grad, theirs.embed.weight.grad, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_loss_that_is_no_mean_is_told() -> None:
    model = net()
    pipeline = Pipeline(model, layers="blocks", stages=2, micro_batches=3)
    with pytest.raises(ConfigurationError, match="not a mean over the samples"):
        pipeline.train(lambda part: model(part[0]).square().sum(), batches(1)[0])


def test_autocast_in_the_step_is_no_reason_to_doubt_the_loss(recwarn: pytest.WarningsRecorder) -> None:
    model = net().float()
    pipeline = Pipeline(model, layers="blocks", stages=2, micro_batches=3)

    def step(part: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.loss((part[0].float(), part[1].float()))

    pipeline.train(step, batches(1)[0])
    assert [str(each.message) for each in recwarn if "mean over" in str(each.message)] == []


def with_dropout(process: int) -> list[float]:
    torch.manual_seed(5)
    model = Net(dropout=0.5)
    pipeline = Pipeline(model.double(), **UNCOMPARED, stages=2, micro_batches=2)
    return [pipeline.train(model.loss, batch).item() for batch in batches(2)]


CALLS["with dropout"] = with_dropout


def test_dropout_draws_alike_with_any_number_of_ranks(found: Found) -> None:
    assert found["with dropout"] == [with_dropout(0)] * 2
