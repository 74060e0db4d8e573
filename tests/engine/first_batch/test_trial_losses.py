"""A loss that is not a mean over samples is noticed before the first batch, a mean never; the look leaves no trace."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipe import PipeStrategy
from lightning_pipe.batches import loss_checks
from lightning_pipe.config import RunLayout
from lightning_pipe.engine.first_batch.trial_losses import TrialLosses
from lightning_pipe.engine.first_batch.trial_runs import is_alone
from lightning_pipe.errors import ConfigurationError, CutError, PartitionError
from tests.support import oracle
from tests.support.pairs import pairs, slow_but
from tests.support.processes import run_trainers
from tests.support.token_losses import (
    MESSAGE,
    PADDING,
    WIDTH,
    Batches,
    Chosen,
    Contrastive,
    Heads,
    HeadsOfTokens,
    Kept,
    KeptTokens,
    Layer,
    LayerDrop,
    LoggedBalance,
    LoggedBalanceOfTokens,
    LossWithBalance,
    MeanOfCopies,
    MeanOfSamples,
    MeanOfTokens,
    MeanOfViews,
    Picky,
    Random,
    Routed,
    SeldomDrop,
    SumOfTokens,
    TimeFirst,
    Tokens,
    Views,
    Weighted,
)
from tests.support.trainer_runs import QUIET


def fit(
    module: L.LightningModule, batches: Sequence[Any], devices: int = 1, message: str = MESSAGE, **options: Any
) -> list[str]:
    """Train, and return the warnings that say so, or the error."""
    options = {"micro_batches": 3, **({"stages": 2} if devices == 1 else {}), **options}
    quiet = {**QUIET, **{name: options.pop(name, None) for name in ("callbacks", "precision")}}
    runner = L.Trainer(accelerator="cpu", devices=devices, strategy=PipeStrategy(**options), max_epochs=1, **quiet)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            runner.fit(module, oracle.loader(batches))
        except ConfigurationError as error:
            if message not in str(error):
                raise
            return [str(error)]
    return [str(one.message) for one in caught if message in str(one.message)]


@pytest.mark.parametrize(
    ("loss", "options"),
    pairs(
        [SumOfTokens, MeanOfTokens, Weighted, Contrastive, Views],
        [
            {},
            {"stages": 4, "schedule": "gpipe"},
            {"micro_batches": 6, "recompute": "always"},  # single samples
            {"micro_batches": 4, "stages": 1},  # uneven
            {"micro_batches": 2, "stages": 2, "schedule": "pipedream_2bw"},
        ],
        lambda loss, options: loss == options in (1, 3),  # others below in batches of their own
    ),
)
def test_what_is_no_mean_over_samples_is_told_with_both_numbers(loss: type[Tokens], options: dict[str, Any]) -> None:
    if options.get("schedule") == "pipedream_2bw":
        options = {**options, "deferred_batch_norm": False}
    if loss in (Contrastive, Views) and options.get("micro_batches") == 6:
        pytest.skip("the loss of one sample is 0")
    module, batch = loss(), Batches().batches[0]
    sizes = {3: [2, 2], 6: [1, 1], 4: [2, 2], 2: [3, 3]}[options.get("micro_batches", 3)]
    module.eval()  # dropout is off, and batch norm has seen nothing yet
    parts = [{key: value[a:b] for key, value in batch.items()} for a, b in _bounds(sizes)]
    with torch.no_grad():
        losses = [float(module.loss(module(part["input_ids"]), part["labels"])) for part in parts]
    module.train()
    told = fit(module, [batch, batch], layers="layers", **options)
    assert len(told) == 1
    found = [float(number) for number in re.findall(r"(?:of|have) (\d\S*\.\d+)", told[0])]
    # without deferred batch norm, the statistics of the first micro-batch count already
    assert found == pytest.approx([sum(losses[:2]) / 2, losses[2]], rel=1e-5 if options.get("stages") != 2 else 1e-2)


def _bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return [(0, sizes[0]), (sizes[0], sum(sizes)), (0, sum(sizes))]


@pytest.mark.parametrize("stages", slow_but([1, 2], 2))
@pytest.mark.parametrize("loss", slow_but([MeanOfSamples, MeanOfViews, MeanOfCopies], MeanOfViews))
def test_means_are_passed_over(loss: type[Tokens], stages: int) -> None:
    module = loss(early=0.2 if stages == 2 else 0.0)
    assert fit(module, Batches().batches, layers="layers", message="samples", stages=stages) == []


@pytest.mark.parametrize(
    ("loss", "options"),
    pairs(
        [Chosen, Routed, LayerDrop, SeldomDrop, TimeFirst],
        [{}, {"stages": 1}, {"micro_batches": 6}, {"micro_batches": 2}],
        lambda loss, options: options == loss in (0, 3),
    ),
)
def test_no_false_alarms(loss: type[Tokens], options: dict[str, Any]) -> None:
    L.seed_everything(1, verbose=False)
    assert fit(loss(early=0.1), Batches(number=2).batches, layers="layers", message="samples", **options) == []


@pytest.mark.parametrize("time", slow_but([2, 6], 2))
def test_samples_along_the_dimension_that_fits(time: int) -> None:
    """Time may be as long as two micro-batches, or one."""
    batch = {name: value[:, :time] for name, value in Batches().batches[0].items()}
    assert fit(TimeFirst(), [batch], layers="layers", message="samples") == []


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (Random, "it depends on random numbers, though dropout is off"),
        (Picky, "two micro-batches together raise ValueError: too many samples"),
    ],
)
def test_a_check_that_cannot_be_made_says_why_once(loss: type[Tokens], reason: str) -> None:
    (told,) = fit(loss(), Batches(number=2).batches, layers="layers", message="samples")
    assert "not checked" in told
    assert reason in told
    if loss is Picky:
        batches = Batches(number=2).batches
        assert fit(loss(), batches, layers="layers", message="not checked", loss_weight=lambda part: 2.0) == []
        assert fit(loss(), batches, layers="layers", message="not checked", compare_losses=False) == []


@pytest.mark.parametrize(
    ("mean", "other"),
    slow_but(
        [(Kept, KeptTokens), (Heads, HeadsOfTokens), (Routed, LossWithBalance), (LoggedBalance, LoggedBalanceOfTokens)],
        (Kept, KeptTokens),
        (Routed, LossWithBalance),
    ),
)
@pytest.mark.parametrize("stages", slow_but([2, 4], 2))
def test_what_differs_and_is_not_random_is_judged(mean: type[Tokens], other: type[Tokens], stages: int) -> None:
    """What the step changes by its own value is put back for each run; heads may be as many as samples.

    What layers say of a micro-batch is judged with the loss, and what is only logged does not end the check.
    """
    batches = Batches().batches
    assert fit(mean(), batches, layers="layers", message="over the samples", stages=stages) == []
    (told,) = fit(other(), batches, layers="layers", message="over the samples", stages=stages)
    assert MESSAGE in told


def test_all_neighbours_are_compared_in_the_first_batch_and_two_in_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[list[int]] = []
    found = loss_checks.trial_losses

    def counted(pipeline: Any, step: Any, batches: Sequence[Any], seed: int, **how: Any) -> TrialLosses:
        runs.append([len(each["labels"]) for each in batches])
        return found(pipeline, step, batches, seed, **how)

    monkeypatch.setattr(loss_checks, "trial_losses", counted)
    assert fit(MeanOfSamples(), Batches(number=4).batches, layers="layers") == []
    assert runs == [
        [2, 2, 2, 4, 4, 4],
        [2, 2, 4, 4],
        [2, 2, 4, 4],
    ]  # behind single ones a micro-batch twice


def test_later_batches_are_checked_too() -> None:
    """In the first batch all labels are of one class, whose weight does not matter."""
    batches = Batches(number=2).batches
    batches[0]["labels"] = torch.ones_like(batches[0]["labels"])
    batches[1]["labels"] = batches[1]["input_ids"]
    assert len(fit(Weighted(), batches[:1], layers="layers")) == 0
    assert len(fit(Weighted(), batches, layers="layers")) == 1


class TimeFirstBatch(TimeFirst):
    """Gets batches with time first, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"].T)[:, -1], batch["label"])


class TokensOfTimeFirstBatch(TimeFirst):
    """... and its loss is no mean over samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return MeanOfTokens.loss(self, self(batch["input_ids"].T), batch["labels"].T)  # type: ignore[arg-type]


def along_time(batch: Any, count: int) -> list[Any]:
    """Cuts uneven parts of a batch with time first."""
    sizes = [3, 2, 1]
    return [
        {
            "input_ids": batch["input_ids"][:, end - size : end],
            "labels": batch["labels"][:, end - size : end],
            "label": batch["label"][end - size : end],
        }
        for size, end in zip(sizes, (3, 5, 6), strict=True)
    ]


def test_own_slices_along_another_dimension() -> None:
    batch = {name: value.T.contiguous() for name, value in Batches().batches[0].items()}
    batch["label"] = batch["labels"][-1].clamp(min=0)
    weight = {"loss_weight": lambda part: len(part["label"])}
    options: dict[str, Any] = {"layers": "layers", "split_batch": along_time, **weight}
    assert fit(TimeFirstBatch(), [batch], message="samples", **options) == []
    assert len(fit(TokensOfTimeFirstBatch(), [batch], **options)) == 1
    found, plain = TimeFirstBatch(), TimeFirstBatch()
    for module in (found, plain):
        for part in module.modules():
            part.p = 0.0  # type: ignore[assignment]
    losses = oracle.fit(found, [batch] * 2, clip=None, strategy=PipeStrategy(stages=2, **options)).losses
    assert losses == pytest.approx(oracle.fit(plain, [batch] * 2, clip=None).losses, rel=1e-9)


@pytest.mark.parametrize("precision", slow_but(["bf16-mixed", "bf16-true", "16-true", "32-true"], "bf16-true"))
def test_rounding_is_no_difference(precision: str) -> None:
    """In some of the batches a micro-batch twice is what it is once, to the last bit."""
    batches = Batches(samples=8, number=4).batches
    for loss, times in ((MeanOfSamples, 0), (SumOfTokens, 1)):
        assert len(fit(loss().float(), batches, layers="layers", precision=precision, micro_batches=8)) == times


def test_samples_in_the_order_of_their_classes_do_not_hide_it() -> None:
    """The weight of a class matters only where another one is beside it."""
    batch = Batches().batches[0]
    batch["labels"] = (torch.arange(6) // 2)[:, None].expand_as(batch["labels"]).clone()
    assert len(fit(Weighted(), [batch], layers="layers", micro_batches=6)) == 1


def tokens(micro_batch: Any) -> float:
    return float((micro_batch["labels"] != PADDING).sum())


def test_nobody_is_told_who_has_said_what_counts() -> None:
    batches = Batches().batches
    assert fit(MeanOfTokens(), batches, layers="layers", loss_weight=tokens) == []
    assert fit(SumOfTokens(), batches, layers="layers", loss_weight="sum") == []


def test_sums_are_added() -> None:
    """The gradient of a sum over the batch, as on one device."""
    batches = Batches(number=2).batches
    found, plain = ({}, {})
    for into, strategy in ((found, PipeStrategy(layers="layers", loss_weight="sum", micro_batches=4)), (plain, "auto")):
        module = SumOfTokens()
        module.late.p = module.layers[3].drop.p = 0.0
        module.norm.eval()
        module.norm.train = lambda mode=True, norm=module.norm: norm  # type: ignore[method-assign]
        trace = oracle.fit(module, batches, clip=None, strategy=strategy)
        into.update(trace.weights, **{f"loss {i}": torch.tensor(loss) for i, loss in enumerate(trace.losses)})
    wrong = {name for name in plain if "calls" not in name and not oracle.close(found[name], plain[name])}
    assert not wrong


class Looked(MeanOfTokens):
    """Counts the looks."""

    looks = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        Looked.looks += is_alone()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("options", slow_but([{}, {"recompute": "always"}, {"stages": 1}], {}), ids=str)
def test_the_look_leaves_no_trace(options: dict[str, Any]) -> None:
    outcomes, Looked.looks = [], 0
    for looks in (False, True):
        module, recorder = Looked(early=0.1), oracle.Recorder()
        L.seed_everything(3, verbose=False)
        options = {**options, "layers": "layers", "loss_weight": tokens, "compare_losses": looks}
        assert fit(module, Batches(number=2).batches, callbacks=[recorder], **options) == []
        assert bool(Looked.looks) == looks
        seen = [module.steps, [layer.shapes for layer in module.layers], random.random(), torch.rand(2).tolist()]
        trace = recorder.trace
        outcomes.append((seen, trace.losses, trace.logged, {k: v.tolist() for k, v in module.state_dict().items()}))
    assert outcomes[0] == outcomes[1]


class Anneals(MeanOfTokens):
    """Changes a module of torch's, whose attributes nobody compares."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.LeakyReLU(1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.act.negative_slope *= 0.5
        return super().training_step(batch, batch_idx)


def test_the_look_puts_back_what_steps_change_in_modules_of_torch() -> None:
    module = Anneals()
    fit(module, Batches(number=2).batches, layers="layers", stages=1, loss_weight=tokens)
    assert module.act.negative_slope == 0.5**6  # two batches of three micro-batches


class Gathers(MeanOfTokens):
    """Asks other replicas in a step: they may not be there for the look."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = super().loss(logits, labels)
        assert torch.equal(self.all_gather(loss.detach()), torch.stack([loss.detach()] * (2 if is_alone() else 1)))
        return loss


def test_the_look_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = PipeStrategy.all_gather

    def one_of_two(strategy: PipeStrategy, tensor: Tensor, group: Any, sync_grads: bool) -> Tensor:
        if not is_alone():
            return tensor[None]
        two: Any = copy(strategy)
        two._layout, two.world = RunLayout(1, 2, 2), copy(strategy.world)
        two.world._connection = replace(two.world._connection, replicas="those of torch")
        return gather(two, tensor, group, sync_grads)

    monkeypatch.setattr(PipeStrategy, "all_gather", one_of_two)
    assert len(fit(Gathers(), Batches().batches, layers="layers")) == 1


@pytest.mark.parametrize("part", slow_but(["head", "layer"], "head"))
def test_compiled_code_is_left_alone(part: str) -> None:
    module = MeanOfTokens()
    (module.head if part == "head" else module.layers[3]).compile(backend="eager")
    assert fit(module, Batches().batches, layers="layers") == []


class Unnoted(list[int]):
    def append(self, number: int) -> None:
        pass


def told_by_processes(process: int, schedules: Sequence[str]) -> list[int]:
    batches = Batches(samples=8).batches
    options = {"layers": "layers", "micro_batches": 4, "devices": 2}
    found = []
    for schedule in schedules:
        module = MeanOfTokens(early=0.1)
        # with several pipes neither the step nor its layers may change anything
        module.steps, module.layers = Unnoted(), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)).double()
        found.append(len(fit(module, batches, schedule=schedule, **options)))
    return found


def test_all_processes_tell_it() -> None:
    assert run_trainers(told_by_processes, 2, timeout=60, schedules=["1f1b", "chimera"]) == [[1] * 2] * 2


class CountsElsewhere(MeanOfSamples):
    """Computes with a counter of its class, which nobody puts back."""

    count = 0

    def forward(self, ids: Tensor) -> Tensor:
        CountsElsewhere.count += 1
        return super().forward(ids) * (1.0 + 0.1 * self.count)


def test_what_a_look_changes_and_the_step_computes_with_is_refused() -> None:
    with pytest.raises(CutError, match=r"when it runs for it again.*\n?.*on_train_batch_start"):
        fit(CountsElsewhere(), Batches().batches, layers="layers", stages=1)


class ByFrequency(MeanOfSamples):
    """Looks up its embeddings by torch's function, outside the layers or in one of them."""

    def __init__(self, place: str) -> None:
        super().__init__()
        if place == "layer":
            self.layers.insert(0, LooksUp(self.embed))
            self.embed = nn.Identity()
        else:
            self.embed = LooksUp(self.embed)


class LooksUp(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight, scale_grad_by_freq=True)


@pytest.mark.parametrize("place", slow_but(["step", "layer"], "step"))
def test_gradients_by_frequency_are_refused_where_a_function_is_asked_for_them(place: str) -> None:
    with pytest.raises(PartitionError, match=r"call of embedding\(\) has scale_grad_by_freq: it divides gradients"):
        fit(ByFrequency(place), Batches().batches, layers="layers", stages=1)


class PickyLayer(Layer):
    """Refuses the size that two micro-batches have together, on its own rank."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 3:
            raise ValueError("too many samples")
        return super().forward(x)


def refused_on_one_rank(process: int, places: Sequence[int]) -> list[int]:
    found = []
    for place in places:
        module = MeanOfSamples()
        module.layers[place] = PickyLayer(0.0).double()
        found.append(len(fit(module, Batches().batches, devices=2, layers="layers", message="too many samples")))
    return found


def test_a_run_that_fails_on_one_rank_ends_on_all() -> None:
    assert run_trainers(refused_on_one_rank, 2, timeout=60, places=[0, 3]) == [[1, 1], [0, 0]]
