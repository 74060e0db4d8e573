"""What a step reads of modules, while their forward passes change it, is what one device reads, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import product
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipeStrategy
from lightning_pipe.intercept.state_reads import Watched
from lightning_pipe.patches import replaced
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

WIDTH, SAMPLES, BATCH = 4, 16, 4
DATA = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).double()


class Computes(nn.Module):
    """A module with attributes that its class provides."""

    default = 1.0

    @cached_property
    def once(self) -> float:
        return self.default + 1.0

    def method(self) -> float:
        return self.once + 1.0


def test_what_the_class_provides_is_bound_while_it_is_watched() -> None:
    read: list[str] = []
    module = Computes()
    with ExitStack() as watched:
        for name in ("default", "once", "method"):
            watching = Watched(Computes, name, lambda _, name: read.append(name))
            watched.enter_context(replaced(Computes, name, watching, gated=False))
        assert (module.default, module.once, module.once, module.method()) == (1.0, 2.0, 2.0, 3.0)
        module.default = 5.0
        assert (module.default, Computes().default) == (5.0, 1.0)
    assert read[:4] == ["default", "once", "default", "once"]
    assert (module.default, module.once) == (5.0, 2.0)


class Memory:
    """An object of the user's."""

    def __init__(self) -> None:
        self.calls = 0


class Counts(nn.Module):
    """A module with parameters that keeps something of its calls, in all ways that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls, self.values = 0, [0.0]
        self.memory, self.hidden = Memory(), Memory()
        self.output = torch.zeros(())
        self.register_buffer("size", torch.ones(()))
        self.register_buffer("large", torch.ones(20_000))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.memory.calls += 1
        self.hidden.calls += 1
        self.hidden.open = lambda: None  # type: ignore[attr-defined]  # nothing that pickles
        self.values.append(float(x.detach().mean()))
        self.size.mul_(0.9).add_(x.detach().abs().mean())
        self.large.mul_(0.9)
        hidden = torch.tanh(self.linear(x) * (1 + 0.01 * self.calls))
        self.output = hidden.mean()
        return hidden


Case = tuple[str, str, bool]
"""Of which module something is read, what, and whether before its call."""


class Seldom(nn.Module):
    """Keeps something for the first time when others are taken to keep nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.large, self.of_largest = 0, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 1000:  # the last of eight batches
            self.large += 1
            self.of_largest = x.mean() * self.large
        return self.linear(x)


class ReadsSeldom(L.LightningModule):
    """Logs what is seldom kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Seldom() for _ in range(4)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.layers(batch[0]).sum()
        for number, layer in enumerate(self.layers):
            self.log(f"large {number}", float(layer.large), reduce_fx="max")
        self.log("of largest", self.layers[0].of_largest + 0 * out, reduce_fx="max")


def seldom(process: int, devices: int | None) -> dict[str, float]:
    """What is logged of it."""
    quiet()
    L.seed_everything(7, verbose=False)
    data = torch.cat([DATA, DATA])
    data[-BATCH] = 100_000.0
    strategy: Any = PipeStrategy(layers="layers") if devices else "auto"
    trainer = L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, **QUIET)
    trainer.validate(ReadsSeldom().double(), DataLoader(TensorDataset(data), BATCH), verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.timeout(60)
def test_what_is_kept_for_the_first_time_after_many_calls_is_seen() -> None:
    plain = seldom(0, None)
    assert plain["large 0"] == 1
    for values in run_trainers(seldom, 2, timeout=40, devices=2):
        assert values == pytest.approx(plain, rel=1e-9)


class Reads(L.LightningModule):
    """Computes with what it reads of modules."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.cases = cases
        self.early, self.late = Counts(), Counts()
        self.layers = nn.Sequential(*(Counts() for _ in range(8)))

    def read(self, *, before: bool) -> list[Any]:
        of = {"first": self.layers[0], "last": self.layers[-1], "early": self.early, "late": self.late}
        return [_number(getattr(of[module], name)) for module, name, early in self.cases if early == before]

    def step(self, x: Tensor) -> Tensor:
        reads = self.read(before=True)
        out = self.late(self.layers(self.early(x)))
        reads += self.read(before=False)
        return (out * (1 + sum(0.01 * number * value for number, value in enumerate(reads, 1)))).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("value", self.step(batch[0]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _number(value: Any) -> Any:
    if isinstance(value, Memory):
        return value.calls
    if isinstance(value, Tensor) and value.dim():
        return value.mean()
    return sum(value) if isinstance(value, list) else value


def found(process: int, devices: int | None, cases: Sequence[Case], **options: Any) -> list[float]:
    """What an evaluation logs, and another one after the module has been trained."""
    quiet()
    micro_batches = options.setdefault("micro_batches", 1)

    def trainer(**settings: Any) -> L.Trainer:
        strategy: Any = PipeStrategy(layers="layers", **options) if devices else "auto"
        settings = {**QUIET, **settings, "max_epochs": 1}
        return L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, **settings)

    def loader(size: int = BATCH) -> Any:
        return DataLoader(TensorDataset(DATA), size)

    L.seed_everything(7, verbose=False)
    module = Reads(cases).double()
    values = []
    for trains in (False, True):
        if trains:
            parts = 1 if devices else micro_batches
            trainer(accumulate_grad_batches=parts, limit_val_batches=0).fit(module, loader(BATCH // parts))
        evaluates = trainer()
        evaluates.validate(module, loader(), verbose=False)
        values.append(float(evaluates.callback_metrics["value"]))
    return values


def check(devices: int, cases: Sequence[Case], **options: Any) -> None:
    """A pipeline computes the same as one device."""
    plain = found(0, None, cases, micro_batches=options["micro_batches"])
    runs = run_trainers(found, devices, timeout=40, devices=devices, cases=cases, **options) if devices > 1 else None
    for values in runs or [found(0, 1, cases, **options)]:
        assert values == pytest.approx(plain, rel=1e-9)


BEHIND = [
    *product(("early", "late", "first", "last"), ("calls", "values", "memory", "output"), (False,)),
    *product(("early", "late", "last"), ("size",), (False,)),
    *product(("late", "last"), ("large", "hidden"), (False,)),
]
BEFORE = [*product(("early", "first"), ("calls", "values", "memory"), (True,)), ("early", "size", True)]


@pytest.mark.timeout(60)
def test_what_reaches_every_reader_in_time_equals_one_device() -> None:
    check(2, BEHIND + BEFORE, micro_batches=2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "options", [pytest.param({"stages": 2}, marks=pytest.mark.slow), {"stages": 2, "recompute": "always"}], ids=str
)
def test_of_several_stages_on_a_rank_what_is_read_behind_the_calls_equals_one_device(options: dict[str, Any]) -> None:
    check(1, BEHIND, micro_batches=2, **options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (2, {"stages": 4, "schedule": "interleaved"}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (4, {}),
                (2, {"recompute": "always"}),
                (2, {"schedule": "dualpipev"}),
                (2, {"schedule": "gpipe", "stream_evaluation": False}),
            )
        ),
    ],
    ids=str,
)
def test_the_same_under_other_schedules(devices: int, options: dict[str, Any]) -> None:
    linear = "stages" not in options and options.get("schedule") != "dualpipev"
    check(devices, BEHIND + (BEFORE if linear else []), micro_batches=4, **options)


LATER = r"changes on a later stage than those that read it"
REFUSED = {
    ("late", "calls", True): rf"`self\.late\.calls`, which a forward pass {LATER}",
    ("last", "size", True): rf"`self\.layers\.7\.size`, which a forward pass {LATER}",
    ("first", "output", True): rf"`self\.layers\.0\.output`, which a forward pass {LATER}",
    ("first", "size", False): r"Rank 0 does not hold 'layers.0.size'",
    ("early", "hidden", False): r"`self\.early\.hidden`, which a forward pass changes on a stage that cannot show it",
    ("early", "large", False): r"`self\.early\.large`, which a forward pass changes on a stage that cannot show it",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_is_refused(case: Case) -> None:
    with pytest.raises(Exception, match=REFUSED[case]):
        run_trainers(found, 2, timeout=40, devices=2, cases=[case], micro_batches=2)


@pytest.mark.parametrize("case", [("early", "calls", True), ("first", "memory", True), ("last", "values", True)])
def test_with_several_stages_on_a_rank_what_is_read_before_a_call_is_refused(case: Case) -> None:
    with pytest.raises(Exception, match=LATER):
        found(0, 1, [case], micro_batches=2, stages=2)


@pytest.mark.timeout(60)
def test_of_several_pipes_each_sees_a_part_of_the_micro_batches() -> None:
    with pytest.raises(Exception, match="pipes"):
        run_trainers(found, 2, timeout=40, devices=2, cases=[("early", "calls", False)], schedule="chimera")


class Returns(L.LightningModule):
    """Passes the layers a second time in some batches, where later ones are under way already; logs what is counted."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.early, self.late = Seldom(), Seldom()
        self.layers = nn.Sequential(*(Seldom() for _ in range(4)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden = 10_000 + self.early(batch[0])
        for _ in range(1 + bool(batch[0][0, 0] > self.limit)):
            hidden = 10_000 + self.layers(hidden)
        self.log("out", self.late(hidden).mean())
        for name, module in (("early", self.early), ("late", self.late), ("layer", self.layers[0])):
            self.log(name, float(module.large))


def returning(process: int, devices: int | None, limits: Sequence[float], **options: Any) -> list[dict[str, float]]:
    """What is logged of it."""
    quiet()
    found = []
    for limit in limits:
        L.seed_everything(7, verbose=False)
        strategy: Any = PipeStrategy(layers="layers", **options) if devices else "auto"
        trainer = L.Trainer(accelerator="cpu", devices=devices or 1, strategy=strategy, **QUIET)
        data = TensorDataset(20_000 + torch.cat([DATA, DATA]))
        trainer.validate(Returns(20_000 + limit).double(), DataLoader(data, BATCH), verbose=False)
        found.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("devices", "options"),
    [(2, {}), pytest.param(3, {}, marks=pytest.mark.slow), (2, {"stages": 4, "schedule": "interleaved"})],
    ids=str,
)
def test_a_batch_that_runs_again_counts_once(devices: int, options: dict[str, Any]) -> None:
    limits = (-5.0, 0.0)
    plain = returning(0, None, limits)
    assert plain[0]["layer"] > plain[1]["layer"] > plain[0]["early"] == 4.5  # the mean of 1 to 8
    for values in run_trainers(returning, devices, timeout=40, devices=devices, limits=limits, **options):
        for one, other in zip(values, plain, strict=True):
            assert one == pytest.approx(other, rel=1e-9)
