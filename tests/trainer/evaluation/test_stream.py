"""Evaluations whose batches follow each other through the stages equal one device, or say why they wait."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader

from tests.support import oracle, processes
from tests.support.evaluated_modules import (
    SIZE,
    Alternates,
    AsksMetric,
    Breaks,
    Counts,
    Evaluated,
    Exhausts,
    Generates,
    Hooked,
    Keeps,
    Large,
    Moved,
    ReturnsWeights,
    Rows,
    Samples,
    Scales,
    SideBySide,
    Steps,
    Stream,
    Writer,
    loader,
    most,
)
from tests.support.trainer_runs import QUIET, quiet

CASES: dict[str, tuple[Callable[[], Evaluated], Callable[[], Any], dict[str, Any]]] = {
    "plain": (Evaluated, loader, {}),
    "kept": (Keeps, loader, {}),
    "two_loaders": (Evaluated, lambda: [loader(), loader(rows=9)], {}),
    "side_by_side": (
        SideBySide,
        lambda: L.pytorch.utilities.CombinedLoader([loader(), loader(rows=9)], "min_size"),
        {},
    ),
    "no_length": (Evaluated, lambda: DataLoader(Stream(), batch_size=SIZE), {}),
    "counted": (Counts, loader, {}),
    "hooked": (Hooked, loader, {}),
    "moved": (Moved, loader, {}),
    "samples": (Samples, loader, {}),
    "alternates": (Alternates, loader, {}),
    "scaled": (Scales, loader, {}),
    "off": (Evaluated, loader, {}),
    "unnamed": (Evaluated, loader, {}),
    "unnamed_hooked": (Hooked, loader, {}),
}
WAITING = {"hooked", "moved", "off", "unnamed_hooked"}
"""The cases that run batch by batch; all others stream."""
DEPENDING = {"counted", "scaled"}
"""The cases that stream until stages see that a batch depends on an earlier one; the state contract has others."""


@contextmanager
def watched() -> Iterator[list[int]]:
    """How many batches this rank was ahead of its loop, at every step."""
    from lightning_pipe.engine.streamed_evaluation import StreamedEvaluation
    from lightning_pipe.trainer.evaluation.stream import EvaluationStream

    found: list[int] = []
    latest: dict[int, int] = {}
    perform, step = StreamedEvaluation.perform, EvaluationStream.step

    def performing(stream: Any, action: Any) -> None:
        if action.kind == "F":
            latest[id(stream)] = max(latest.get(id(stream), 0), action.micro_batch)
        perform(stream, action)

    def stepping(stream: Any, args: Any) -> Any:
        found.append(max(0, latest.get(id(stream._engine), 0) - stream._batches.current.number))
        return step(stream, args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamedEvaluation, "perform", performing)
        patch.setattr(EvaluationStream, "step", stepping)
        yield found


def build(name: str, devices: int | None, **options: Any) -> tuple[L.Trainer, L.LightningModule, Steps]:
    from lightning_pipe import PipeStrategy

    quiet()
    L.seed_everything(7, verbose=False)
    logger = Steps()
    strategy: Any = "auto"
    if devices:
        options |= {"stream_evaluation": name != "off", "compare_losses": False}
        # else the first batch of the evaluation shows them
        options |= {} if name.startswith("unnamed") else {"layers": "model"}
        strategy = PipeStrategy(**options)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices or 1,
        strategy=strategy,
        **{**QUIET, "logger": logger, "max_epochs": 4, "inference_mode": False, **CASES[name][2]},
    )
    return trainer, CASES[name][0]().double(), logger


def validated(name: str, devices: int | None, **options: Any) -> dict[str, Any]:
    """What a case leaves behind: what is returned, logged and taken from the data."""
    trainer, module, logger = build(name, devices, **options)
    data = CASES[name][1]()
    with watched() as ahead:
        returned = trainer.validate(module, data, verbose=False)
    taken = data.dataset.taken if isinstance(data, DataLoader) and isinstance(data.dataset, Rows) else 0
    return {
        "returned": returned,
        "logged": logger.logged,
        "metrics": oracle.numbers(trainer.callback_metrics),
        "taken": taken,
        "ahead": max(ahead, default=0),
    }


def all_cases(process: int, devices: int | None, names: list[str], **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {name: validated(name, devices, **options) for name in names}
    if "plain" in names:
        trainer, module, _ = build("plain", devices, **options)
        trainer.callbacks += [writer := Writer(), EarlyStopping("loss_epoch", patience=0, min_delta=0.2)]
        data = DataLoader(Rows(), batch_size=SIZE)
        trainer.fit(module, loader(rows=SIZE), data)
        found["fit"] = {"epochs": trainer.current_epoch, "metrics": oracle.numbers(trainer.callback_metrics)}
        found["test"] = trainer.test(module, data, verbose=False)
        with watched() as ahead:
            found["predictions"] = predicted(trainer, module)
        found["written"] = list(writer.batches)
        most.clear()
        trainer.predict(Large().double(), [data, loader(rows=9)], return_predictions=False)
        found["most"] = max(most, default=0)
        found["predicted_ahead"] = max(ahead, default=0)
    return found


def predicted(trainer: L.Trainer, module: L.LightningModule) -> list[Any]:
    """By loader what each batch gives, as lists."""
    loaders = [DataLoader(Rows(), batch_size=SIZE), loader(rows=9)]
    return [
        [{name: torch.as_tensor(value).tolist() for name, value in batch.items()} for batch in of_loader]
        for of_loader in trainer.predict(module, loaders)
    ]


def replica(process: int, devices: int | None, **options: Any) -> dict[str, Any]:
    """Two validations, which stream and do not, and predictions."""
    found: dict[str, Any] = {name: validated(name, devices, **options) for name in ("plain", "off")}
    trainer, module, _ = build("plain", devices, **options)
    return {**found, "predictions": predicted(trainer, module)}


def assert_same(found: dict[str, Any], plain: dict[str, Any], *, first: bool, names: list[str]) -> None:
    for name in names:
        ours, theirs = found[name], plain[name]
        for one, other in zip(ours["returned"], theirs["returned"], strict=True):
            assert one == pytest.approx(other, rel=1e-9), name
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-9), name
        if first:  # the only rank with a logger of its own, and the one that loads
            assert len(ours["logged"]) == len(theirs["logged"]), name
            for one, other in zip(ours["logged"], theirs["logged"], strict=True):
                assert one == pytest.approx(other, rel=1e-9), name
            assert ours["taken"] == theirs["taken"], name
    if "fit" in plain:
        assert found["fit"]["epochs"] == plain["fit"]["epochs"]
        assert found["fit"]["metrics"] == pytest.approx(plain["fit"]["metrics"], rel=1e-9)
        assert found["test"][0] == pytest.approx(plain["test"][0], rel=1e-9)
        assert found["predictions"] == plain["predictions"]
        assert found["written"] == plain["written"]
        assert found["most"] <= 1  # that of the step before


def run(ranks: int, names: list[str], **options: Any) -> list[dict[str, Any]]:
    """The cases on several ranks, compared with one device."""
    several = processes.run_trainers(all_cases, ranks, timeout=100, devices=ranks, names=names, **options)
    return compared(several, names)


def compared(several: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    plain = all_cases(0, None, names)
    for process, found in enumerate(several):
        assert_same(found, plain, first=process == 0, names=names)
    return several


def check_two_ranks(several: list[dict[str, Any]], names: list[str]) -> None:
    for name in names:
        # process 1 has the first stage
        # what has begun ends before batches wait
        assert several[0][name]["ahead"] == 0 or name in DEPENDING, name
        assert (several[1][name]["ahead"] == 0) == (name in WAITING), name
    assert several[1].get("predicted_ahead", 2) == 2


OFTEN = ["plain", "counted", "hooked", "samples", "unnamed", "unnamed_hooked"]
SEVERAL_STAGES = ["kept", "scaled", "hooked"]
"""Batches that stream, that stream until they depend on each other, and that wait."""
Two = dict[str, list[Any]]


@pytest.fixture(scope="module")
def two() -> Two:
    """What two ranks have."""
    calls: dict[str, Any] = {
        "often": partial(all_cases, devices=2, names=OFTEN),
        "several stages": partial(all_cases, devices=2, names=SEVERAL_STAGES, schedule="interleaved"),
        "set": partial(set_layers, devices=2),
        **{name: partial(failing, devices=2, name=name) for name in FAILURES},
    }
    return processes.in_turn(calls, 2)


def test_two_ranks_equal_one_device(two: Two) -> None:
    check_two_ranks(compared(two["often"], OFTEN), OFTEN)


PLACEMENTS = {
    "interleaved": 2,
    "zero_bubble_v": 2,
    "dualpipev": 2,
    "chimera": 2,
    "dualpipe": 2,
    "gems": 2,
    "of_four": 4,
}
"""Placements with several stages or pipes on a rank, and the number of ranks."""
BIDIRECTIONAL = {"chimera", "dualpipe", "gems"}


def schedule(name: str) -> Any:
    """The schedule of a placement."""
    from lightning_pipe.schedules import ZeroBubble

    return {"zero_bubble_v": ZeroBubble(variant="v"), "of_four": "interleaved"}.get(name, name)


def check_placement(name: str, several: list[dict[str, Any]], cases: list[str]) -> None:
    for case in cases:
        ahead = [found[case]["ahead"] for found in several]
        # every rank runs a stage of a later batch before its loop comes to that batch, unless it has the last one alone
        early = ahead[1:] if name in BIDIRECTIONAL else ahead
        assert (min(early) > 0) == (max(early) > 0) == (case not in WAITING), (case, ahead)
    assert min(found.get("predicted_ahead", 1) for found in several[name in BIDIRECTIONAL :]) > 0


def test_ranks_with_several_stages_equal_one_device(two: Two) -> None:
    check_placement("interleaved", compared(two["several stages"], SEVERAL_STAGES), SEVERAL_STAGES)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PLACEMENTS))
def test_all_placements_equal_one_device(name: str) -> None:
    check_placement(name, run(PLACEMENTS[name], list(CASES), schedule=schedule(name)), list(CASES))


@pytest.mark.slow
def test_two_ranks_equal_one_device_in_rarer_cases() -> None:
    names = [name for name in CASES if name not in OFTEN]
    check_two_ranks(run(2, names), names)


@pytest.mark.slow
def test_four_ranks_equal_one_device() -> None:
    names = [*OFTEN, "kept", "scaled", "alternates", "no_length", "side_by_side"]
    several = run(4, names)
    assert [found["plain"]["ahead"] for found in several] == [0, 3, 4, 5]


FAILURES: dict[str, tuple[Callable[[], Evaluated], Callable[[], DataLoader], str]] = {
    "metric": (AsksMetric, loader, "computes the metric `self.accuracy` before it calls the layers of later stages"),
    "exhausted": (Exhausts, loader, "validation_step raises StopIteration"),
    "step": (Breaks, loader, "the first stage fails in batch 3"),
    "generator": (Generates, loader, "what a step returns, does not pickle: cannot pickle 'generator' object"),
    "weights": (ReturnsWeights, loader, "does not hold 'model.0.0.weight'"),
    "data": (Evaluated, lambda: loader(fails_at=4 * SIZE + 1), "this row cannot be read"),
    "unnamed": (Evaluated, lambda: loader(fails_at=1), "this row cannot be read"),  # before there are layers
}


def failing(process: int, devices: int, name: str) -> tuple[str, int]:
    """The error of an evaluation, with its notes, and the number of batches that were logged before."""
    trainer, _, logger = build("unnamed" if name == "unnamed" else "plain", devices)
    try:
        trainer.validate(FAILURES[name][0]().double(), FAILURES[name][1](), verbose=False)
    except Exception as error:
        return "".join(traceback.format_exception(error)), len(logger.logged)
    return "", 0


@pytest.mark.parametrize("name", FAILURES)
def test_a_rank_that_fails_ends_all_with_its_reason(name: str, two: Two) -> None:
    for text, _ in two[name]:
        assert FAILURES[name][2] in text
    if name == "data":
        # the hooks and the logger of the batches before come first, as on one device
        assert two[name][0][1] == 4


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved", marks=pytest.mark.slow)])
def test_two_replicas_of_two_ranks(schedule: str) -> None:
    several = processes.run_trainers(replica, 4, timeout=80, devices=4, data_parallel_size=2, schedule=schedule)
    for found in several:
        # what batches log does not depend on whether they stream
        for key in ("returned", "logged", "metrics"):
            assert found["plain"][key] == found["off"][key]
    ahead = sorted(found["plain"]["ahead"] for found in several)
    assert ahead[2:] == [2, 2], ahead  # each replica has three batches
    # The replicas' numbers of batches differ, and every sample is predicted once. The predictions have a number of the
    # batch among them, so each replica keeps its own.
    plain = replica(0, None)["predictions"]
    for loader_, of_loader in enumerate(plain):
        rows = [row for batch in of_loader for row in batch["row"]]
        for process, found in enumerate(several):
            own = [row for batch in found["predictions"][loader_] for row in batch["row"]]
            assert own == rows[process // 2 :: 2]


def set_layers(process: int, devices: int | None) -> tuple[dict[str, float], list[Any]]:
    """What an evaluation whose batches wait logs, and what a training behind it finds in the layers."""
    trainer, _, _ = build("off", devices)
    module = Scales().double()
    trainer.validate(module, loader(), verbose=False)
    return oracle.numbers(trainer.callback_metrics), [layer.scale for layer in module.model]


def test_what_the_step_sets_in_layers_is_set_on_all_ranks(two: Two) -> None:
    metrics, scales = set_layers(0, None)
    for found in two["set"]:
        assert found[0] == pytest.approx(metrics, rel=1e-9)
        assert found[1] == pytest.approx(scales, rel=1e-9)
