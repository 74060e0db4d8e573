"""Random steps give the numbers of one device or raise; nothing in between."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from lightning_pipe import schedules
from lightning_pipe.errors import CutError
from tests.support import oracle
from tests.support.equality_sweep import Point, evaluated, expected, pipelined, streamed
from tests.support.model_zoo import Entry
from tests.support.pairs import slow_but
from tests.support.random_programs import entry

CHUNK = 25


def point(seed: int) -> Point:
    draw = random.Random(seed)
    schedule, stages, ranks = draw.choice(
        [
            ("1f1b", 4, 1),
            ("gpipe", 2, 1),
            ("1f1b", 2, 2),
            ("gpipe", 4, 2),
            ("1f1b", 4, 4),
            ("interleaved", 4, 2),
            ("zero_bubble", 4, 4),
            ("chimera", 4, 4),
        ]
    )
    recompute = draw.choice(["never", "never", "always"])
    return Point(
        schedule, stages, draw.choice([1, 2, 3]), ranks=ranks, evaluate=draw.random() < 0.3, recompute=recompute
    )


def outcome(model: Entry, at: Point) -> str:
    try:
        truth = expected(model, at)
    except RuntimeError:  # autograd does not allow the changes in place
        return "no program"
    try:
        found = pipelined(model, at)
    except CutError as error:
        if "shares" not in str(error):
            error.add_note(f"{model} at {at}")
            raise
        return "refused"
    wrong = oracle.differences(found, truth)
    assert not wrong, f"{model} at {at}: {wrong}"
    return "equal"


def check(seeds: range, changes: bool) -> None:
    outcomes = Counter(outcome(entry(seed, changes), point(seed)) for seed in seeds)
    programs = outcomes["equal"] + outcomes["refused"]
    assert outcomes["equal"] >= 0.7 * programs, outcomes


@pytest.mark.parametrize("changes", slow_but([False, True], True), ids=["pure", "in_place"])
def test_random_programs(changes: bool) -> None:
    check(range(2), changes)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [False, True], ids=["pure", "in_place"])
@pytest.mark.parametrize("start", range(1000, 2000, CHUNK))
def test_many_random_programs(start: int, changes: bool) -> None:
    check(range(start, start + CHUNK), changes)


def check_evaluation(seeds: range, changes: bool) -> None:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        for context in (torch.no_grad, torch.inference_mode):
            model, at = entry(seed, changes), point(seed)
            with torch.no_grad():
                try:
                    module = model.build()
                    truth = [float(module.loss(part)) for part in oracle.split(model.batches(1)[0], at.micro_batches)]
                except RuntimeError:  # changes of expanded tensors
                    continue
            try:
                found = evaluated(model, at, context)
            except CutError as error:
                if "shares" not in str(error):
                    raise
                outcomes["refused"] += 1
                continue
            assert found == pytest.approx(2 * truth, rel=1e-9, abs=1e-9), f"{model} at {at}, {context.__name__}"
            outcomes["equal"] += 1
    # memory that tensors share is counted without gradients, too: of 25 programs a third may change some
    assert outcomes["equal"] >= 0.6 * outcomes.total(), outcomes


@pytest.mark.parametrize("changes", slow_but([False, True], True), ids=["pure", "in_place"])
def test_random_programs_in_evaluation(changes: bool) -> None:
    check_evaluation(range(2), changes)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [False, True], ids=["pure", "in_place"])
@pytest.mark.parametrize("start", range(2000, 3000, CHUNK))
def test_many_random_programs_in_evaluation(start: int, changes: bool) -> None:
    check_evaluation(range(start, start + CHUNK), changes)


BATCHES = 7
STREAMED = [
    *(Point("gpipe", ranks) for ranks in (2, 3, 4)),
    Point("interleaved", 4, ranks=2),
    Point(schedules.ZeroBubble(variant="v"), 4),
    Point("dualpipev", 4),
    Point("chimera", 4, ranks=4),
    Point("gems", 3, ranks=3),
    Point("dualpipe", 4, ranks=4),
]


def check_streams(seeds: range, changes: bool) -> None:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        model, at = entry(seed, changes), STREAMED[seed % len(STREAMED)]
        context = (torch.no_grad, torch.inference_mode)[seed % 2]
        with torch.no_grad():
            try:
                module = model.build()
                truth = [float(module.loss(batch)) for batch in model.batches(BATCHES)]
            except RuntimeError:  # changes of expanded tensors
                continue
        found, _ = streamed(model, at, BATCHES, context)
        if len(found) < BATCHES:  # what is wrong with it shows when it runs behind the others
            with pytest.raises(CutError, match="shares"):
                evaluated(model, at, context)
            outcomes["refused"] += 1
            continue
        assert found == pytest.approx(truth, rel=1e-9, abs=1e-9), f"{model} at {at}"
        outcomes["equal"] += 1
    assert outcomes["equal"] >= 0.7 * outcomes.total(), outcomes


@pytest.mark.parametrize("changes", slow_but([False, True], True), ids=["pure", "in_place"])
def test_random_programs_in_streams(changes: bool) -> None:
    check_streams(range(changes, len(STREAMED), 7), changes)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [False, True], ids=["pure", "in_place"])
@pytest.mark.parametrize("start", range(3000, 4000, CHUNK))
def test_many_random_programs_in_streams(start: int, changes: bool) -> None:
    check_streams(range(start, start + CHUNK), changes)
