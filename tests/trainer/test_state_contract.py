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
    state_programs_names,  # noqa: F401
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
Cell = tuple[str, str, str]
"""A phase, a schedule and the name of a program."""
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


def several(process: int, cells: Sequence[Cell], compared: bool, accelerator: str) -> list[Left]:
    """Cells in one world, one behind the other's error; ``compared``: whether stages compare words."""
    if not compared:
        Digest.check = lambda *_: None  # type: ignore[method-assign]
    return [left(*cell, accelerator) for cell in cells]


def left(phase: str, schedule: str, name: str, accelerator: str) -> Left:
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


def ended(cells: Sequence[Cell], compared: bool = True, accelerator: str = "cpu") -> dict[Cell, list[Left]]:
    """What each cell leaves on each process."""
    options = {"cells": cells, "compared": compared, "accelerator": accelerator}
    outcomes = processes.outcomes(several, 2, timeout=30.0 + 2 * len(cells), group_timeout=None, **options)
    # a process that was ended by force leaves nothing of any program
    died = [[Left(error=f"{type(each.error).__name__}: {each.error}")] * len(cells) for each in outcomes]
    found = [each.value or error for each, error in zip(outcomes, died, strict=True)]
    return dict(zip(cells, map(list, zip(*found, strict=True)), strict=True))


@functools.cache
def plain(name: str, phase: str) -> dict[str, list[float]]:
    """What the oracle leaves."""
    how = PROGRAMS[name].oracle
    parts = PARTS if phase == "train" else 1
    with redirect_stdout(io.StringIO()):
        if how == ONE_STAGE:
            return run(name, phase, PipeStrategy(layers="layers", stages=1, micro_batches=parts), 1, 1)
        return run(name, phase, "auto", 1, parts if how == MICRO_BATCHES else 1)


def verdict(cell: Cell, left: list[Left]) -> str:
    """`EQUAL`, an error, or what differs."""
    phase, _, name = cell
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


def amiss(cell: Cell, found: str) -> str:
    """What is not as it is owed: nothing, if all is well."""
    phase, schedule, name = cell
    expected = PROGRAMS[name].expected(phase, schedule)
    if expected == EQUAL:
        return found
    return "" if is_told(expected, found) else found or "equal"


TOLD = {
    *("CounterBefore", "ConfigOfLayersBehind", "GlobalInLayers", "CountsOfLayersInAHook", "ScalesLayersBehind"),
    *("ShrinksBuffers", "SetsAnotherLayer", "ItemsBefore", "OwnGeneratorBefore", "BufferInPlaceBefore"),
    *("QueueBefore", "DecaysWeightsBehind", "AuxiliaryLossesInLists", "SetsItsOwner", "GlobalBefore"),
    *("ReadsALayerAhead", "BatchByItsArray", "StepsAScheduler"),
}
"""One program for each kind of error."""
KEPT = {
    *("AugmentsBefore", "AuxiliaryLosses", "LazyMasks", "ScalesLayersInAHook", "TeacherInAHook", "LayersKeep"),
    *("CounterBeforeReadBehind", "DecaysWeightsInAHook", "LayersReadTheBatch", "Centred", "ConfigBehind"),
    *("CountsOfLayersLogged", "BufferByItsDataBehind", "RateByTheStep"),
}
"""One program for each way in which state stays equal."""
FAST: dict[tuple[str, str], set[str]] = {
    ("train", "1f1b"): TOLD | KEPT,
    ("train", "interleaved"): {"CountsOfLayersLogged", "LayersKeep"},
    ("train", "chimera"): {"ConfigBehind", "Dropout", "LayersKeep"},
    ("train", "recompute"): {"Dropout", "LayersKeep"},
    ("evaluate", "1f1b"): {"GlobalBefore", "LayersKeep", "ReadsALayerAhead"},
    ("evaluate", "interleaved"): {"CountsOfLayersLogged", "GlobalBefore"},
    ("evaluate", "chimera"): {"LayersKeep", "ReadsALayerAhead"},
}
"""In training under 1F1B every kind of error and of what is equal; elsewhere what is another one there."""


def cases() -> list[Any]:
    """Every program in each phase under every schedule."""
    found = []
    for (phase, schedule), name in itertools.product(RUNS, PROGRAMS):
        marks = () if name in FAST[phase, schedule] else pytest.mark.slow
        found.append(pytest.param(phase, schedule, name, marks=marks, id=f"{schedule}-{phase}-{name}"))
    return found


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Callable[[Cell], str]:
    """The verdict of a cell: from one world of all that are fast, or one of the others of its phase and schedule."""

    def world(cell: Cell) -> tuple[str, str] | None:
        return None if cell[2] in FAST[cell[:2]] else cell[:2]

    @functools.cache
    def of_world(place: tuple[str, str] | None) -> dict[Cell, list[Left]]:
        return ended([cell for cell in asked(request, "phase", "schedule", "name") if world(cell) == place])

    return lambda cell: verdict(cell, of_world(world(cell))[cell])


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("phase", "schedule", "name"), cases())
def test_equal_or_told(phase: str, schedule: str, name: str, table: Callable[[Cell], str]) -> None:
    """The first case of a world runs all of it."""
    cell = (phase, schedule, name)
    assert amiss(cell, table(cell)) == ""


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
    told = [("train", "1f1b", name) for name, each in PROGRAMS.items() if each.expected("train", "1f1b") == STALE]
    found = {cell: verdict(cell, each) for cell, each in ended(told, compared=False).items()}
    assert sum(each.startswith("unequal") for each in found.values()) >= 20, found
