"""What a step changes: each program equals its oracle, or an error names the cause and a remedy."""

from __future__ import annotations

import functools
import io
import itertools
import math
import re
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import CommunicationError, PipeError
from lightning_pipe.intercept.digest import Digest
from tests.support import (
    oracle,
    processes,
    state_programs_around,  # noqa: F401
    state_programs_layers,  # noqa: F401
    state_programs_own,  # noqa: F401
    state_programs_parameters,  # noqa: F401
    state_programs_reach,  # noqa: F401
    state_programs_tensors,  # noqa: F401
)
from tests.support.pairs import asked
from tests.support.state_programs import BATCH, EQUAL, MICRO_BATCHES, ONE_STAGE, PROGRAMS, STALE
from tests.support.trainer_runs import QUIET, quiet

PARTS = 2
"""Micro-batches of a batch."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "stages": 4},
    "chimera": {"schedule": "chimera"},
    "recompute": {"schedule": "1f1b", "recompute": "always"},
}
PHASES = ("train", "evaluate")
RUNS = [each for each in itertools.product(PHASES, SCHEDULES) if each != ("evaluate", "recompute")]


@dataclass
class Left:
    """What a run leaves on one process.

    Args:
        values: losses, logs, what hooks read, and weights.
        error: the kind of the error that ended it, and its text.
        told: whether the error has a remedy.
        follows: whether it is the consequence of another process's error.
    """

    values: dict[str, list[float]] = field(default_factory=dict)
    error: str = ""
    told: bool = False
    follows: bool = False


class Recorder(L.Callback):
    """The loss of every batch, as the step returns it and as it logs it."""

    def __init__(self) -> None:
        self.losses, self.logged = list[float](), list[float]()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        # Lightning 2.6 hands over the loss divided by the number of accumulated batches
        self.losses.append(oracle.loss_of(outputs).item() * trainer.accumulate_grad_batches)
        self.logged.append(float(trainer.callback_metrics["loss"]))


def of_batches(values: list[float], parts: int) -> list[float]:
    """The means over the parts of each batch."""
    return [math.fsum(values[start : start + parts]) / parts for start in range(0, len(values), parts)]


def run(
    name: str, phase: str, strategy: Any, devices: int, parts: int, accelerator: str = "cpu"
) -> dict[str, list[float]]:
    """Train or validate; ``parts``: of a batch that the Trainer gets one after the other."""
    quiet()
    L.seed_everything(7, verbose=False)
    module, recorder = PROGRAMS[name].module(parts).double(), Recorder()
    settings = {**QUIET, "max_epochs": 1, "accumulate_grad_batches": parts, "callbacks": [recorder]}
    if phase == "train":
        settings["limit_val_batches"] = 0
    trainer = L.Trainer(accelerator=accelerator, devices=devices, strategy=strategy, **settings)
    data = module.data(BATCH // parts)
    if phase == "train":
        trainer.fit(module, data)
    else:
        trainer.validate(module, data, verbose=False)
    return {
        "losses": of_batches(recorder.losses, parts),
        "logged": of_batches(recorder.logged, parts),
        "last": [float(trainer.callback_metrics["value"])] if phase == "evaluate" else [],
        "read": module.read,
        "weights": [value for each in module.state_dict().values() for value in each.flatten().double().tolist()],
    }


def several(
    process: int, names: Sequence[str], phase: str, schedule: str, compared: bool, accelerator: str
) -> list[Left]:
    """Programs in one world, one behind the other's error; ``compared``: whether stages compare words."""
    if not compared:
        Digest.check = lambda *_: None  # type: ignore[method-assign]
    return [left(name, phase, schedule, accelerator) for name in names]


def left(name: str, phase: str, schedule: str, accelerator: str) -> Left:
    """What a program leaves on this process."""
    options: dict[str, Any] = {"micro_batches": PARTS} if phase == "train" else {}
    options |= {"compare_losses": not PROGRAMS[name].module.mixes}
    options |= {"process_group_backend": "nccl"} if accelerator == "gpu" else {}
    try:
        strategy = PipeStrategy(layers="layers", **options, **SCHEDULES[schedule])
        return Left(run(name, phase, strategy, 2, 1, accelerator))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        follows = isinstance(error, CommunicationError) or "by peer" in str(error)
        told = isinstance(error, PipeError) and bool(error.hint)
        if not isinstance(error, PipeError):
            text += "".join(traceback.format_exception(error))
        return Left(error=text, told=told, follows=follows)


def ended(
    names: Sequence[str], phase: str, schedule: str, compared: bool = True, accelerator: str = "cpu"
) -> dict[str, list[Left]]:
    """What each program leaves on each process."""
    options = {"phase": phase, "schedule": schedule, "compared": compared, "accelerator": accelerator}
    seconds = 30.0 + 2 * len(names)
    outcomes = processes.outcomes(several, 2, timeout=seconds, group_timeout=None, names=names, **options)
    # a process that was ended by force leaves nothing of any program
    died = [[Left(error=f"{type(each.error).__name__}: {each.error}")] * len(names) for each in outcomes]
    found = [each.value or error for each, error in zip(outcomes, died, strict=True)]
    return dict(zip(names, map(list, zip(*found, strict=True)), strict=True))


@functools.cache
def plain(name: str, phase: str) -> dict[str, list[float]]:
    """What the oracle leaves."""
    how = PROGRAMS[name].oracle
    parts = PARTS if phase == "train" else 1
    with redirect_stdout(io.StringIO()):
        if how == ONE_STAGE:
            return run(name, phase, PipeStrategy(layers="layers", stages=1, micro_batches=parts), 1, 1)
        return run(name, phase, "auto", 1, parts if how == MICRO_BATCHES else 1)


def verdict(name: str, phase: str, left: list[Left]) -> str:
    """`EQUAL`, an error, or what differs."""
    errors = sorted((each for each in left if each.error), key=lambda each: (each.follows, not each.told))
    if errors:
        return errors[0].error if errors[0].told else f"no remedy: {errors[0].error}"
    expected = plain(name, phase)
    unequal = [key for key, value in expected.items() for each in left if each.values[key] != near(value)]
    return f"unequal: {', '.join(dict.fromkeys(unequal))}" if unequal else EQUAL


def near(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-9, abs=1e-9, nan_ok=True)


def is_told(expected: str, found: str) -> bool:
    """Whether a verdict is the error that is owed."""
    return bool(found) and not found.startswith(("unequal", "no remedy")) and re.search(expected, found) is not None


def amiss(name: str, phase: str, schedule: str, found: str) -> str:
    """What is not as it is owed: nothing, if all is well."""
    expected = PROGRAMS[name].expected(phase, schedule)
    if expected == EQUAL:
        return found
    return "" if is_told(expected, found) else found or "equal"


FAST = {"ConfigBehind", "CountsOfLayersLogged", "Dropout", "GlobalBefore", "LayersKeep", "ReadsALayerAhead"}
"""Equal or told in the ways that depend on phase and schedule."""
TOLD = {
    *("CounterBefore", "ConfigOfLayersBehind", "GlobalInLayers", "CountsOfLayersInAHook", "ScalesLayersBehind"),
    *("ShrinksBuffers", "SetsAnotherLayer", "ItemsBefore", "OwnGeneratorBefore", "BufferInPlaceBefore"),
    *("QueueBefore", "DecaysWeightsBehind", "AuxiliaryLossesInLists", "SetsItsOwner"),
}
"""One program for each kind of error."""


KEPT = {
    *("ItemsInAHook", "AugmentsBefore", "AuxiliaryLosses", "LazyMasks", "ScalesLayersInAHook", "TeacherInAHook"),
    *("CounterBeforeReadBehind", "CounterInAHook", "DecaysWeightsInAHook", "LayersReadTheBatch", "Centred"),
}
"""One program for each way in which state stays equal."""


def is_fast(phase: str, schedule: str, name: str) -> bool:
    """In training under 1F1B every kind of error and of what is equal; elsewhere a few."""
    return name in FAST or ((phase, schedule) == ("train", "1f1b") and name in TOLD | KEPT)


def cases() -> list[Any]:
    """Every program in each phase under every schedule."""
    found = []
    for (phase, schedule), name in itertools.product(RUNS, PROGRAMS):
        marks = () if is_fast(phase, schedule, name) else pytest.mark.slow
        found.append(pytest.param(phase, schedule, name, marks=marks, id=f"{schedule}-{phase}-{name}"))
    return found


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Callable[[str, str], dict[str, str]]:
    """By phase and schedule the verdicts of all programs that were asked for, from one world."""
    cases = asked(request, "phase", "schedule", "name")

    @functools.cache
    def verdicts(phase: str, schedule: str) -> dict[str, str]:
        names = [name for *place, name in cases if place == [phase, schedule]]
        return {name: verdict(name, phase, left) for name, left in ended(names, phase, schedule).items()}

    return verdicts


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("phase", "schedule", "name"), cases())
def test_equal_or_told(phase: str, schedule: str, name: str, table: Callable[[str, str], dict[str, str]]) -> None:
    """The first case of a schedule and phase runs the world of all of them."""
    assert amiss(name, phase, schedule, table(phase, schedule)[name]) == ""


def test_verdicts_are_of_phases_and_schedules() -> None:
    places = {f"{phase}_{schedule}" for phase, schedule in RUNS}
    for name, each in PROGRAMS.items():
        assert set(each.verdicts) <= places | set(PHASES), name


def test_there_is_a_remedy_for_every_error() -> None:
    """A program that does what it says is in the table, and equal everywhere."""
    for name, each in PROGRAMS.items():
        if any(each.verdicts.values()):
            remedy = PROGRAMS[each.module.remedy]
            assert not any(remedy.verdicts.values()), (name, each.module.remedy)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_the_comparison_twenty_programs_are_unequal() -> None:
    told = [name for name, each in PROGRAMS.items() if each.expected("train", "1f1b") == STALE]
    found = {name: verdict(name, "train", each) for name, each in ended(told, "train", "1f1b", compared=False).items()}
    assert sum(each.startswith("unequal") for each in found.values()) >= 20, found
