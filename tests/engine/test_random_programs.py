"""Random steps give the numbers of one device or raise; nothing in between."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from lightning_pipe import schedules
from lightning_pipe.errors import CutError
from tests.support import oracle
from tests.support.equality_sweep import Point, evaluated, expected, pipelined, streamed
from tests.support.model_zoo import Entry
from tests.support.oracle import Trace
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
CONTEXTS = (torch.no_grad, torch.inference_mode)


def trained(model: Entry, seed: int) -> tuple[Trace, Callable[[], Trace]]:
    """What one device does, and the pipeline."""
    return expected(model, point(seed)), lambda: pipelined(model, point(seed))


def in_evaluation(model: Entry, seed: int) -> tuple[Trace, Callable[[], Trace]]:
    """The same for the micro-batches of a batch, twice in each context."""
    at = point(seed)
    with torch.no_grad():
        module = model.build()
        truth = [float(module.loss(part)) for part in oracle.split(model.batches(1)[0], at.micro_batches)]
    return Trace(4 * truth), lambda: Trace([loss for each in CONTEXTS for loss in evaluated(model, at, each)])


def in_a_stream(model: Entry, seed: int) -> tuple[Trace, Callable[[], Trace]]:
    """The same for batches of an evaluation that follow each other."""
    at, context = STREAMED[seed % len(STREAMED)], CONTEXTS[seed % 2]
    with torch.no_grad():
        module = model.build()
        truth = [float(module.loss(batch)) for batch in model.batches(BATCHES)]

    def pipeline() -> Trace:
        found, _ = streamed(model, at, BATCHES, context)
        # what is wrong with a batch shows when it runs behind the others
        return Trace(found if len(found) == BATCHES else evaluated(model, at, context))

    return Trace(truth), pipeline


Way = Callable[[Entry, int], tuple[Trace, Callable[[], Trace]]]


def outcome(way: Way, seed: int, changes: bool) -> str:
    model = entry(seed, changes)
    try:
        truth, pipeline = way(model, seed)
    except RuntimeError:  # changes in place that autograd does not allow, or of expanded tensors
        return "no program"
    try:
        found = pipeline()
    except CutError as error:
        if "shares" not in str(error):
            error.add_note(f"{model}, seed {seed}")
            raise
        return "refused"
    assert len(found.losses) == len(truth.losses)
    wrong = oracle.differences(found, truth)
    assert not wrong, f"{model}, seed {seed}: {wrong}"
    return "equal"


def check(way: Way, seeds: range, changes: bool) -> None:
    outcomes = Counter(outcome(way, seed, changes) for seed in seeds)
    # changes of memory that tensors share are seen without gradients, too: in a chunk a third may have some
    assert outcomes["equal"] >= 0.6 * (outcomes["equal"] + outcomes["refused"]), outcomes


@pytest.mark.parametrize(
    ("way", "seeds"), [(trained, range(2)), (in_evaluation, range(2)), (in_a_stream, range(1, 9, 7))]
)
def test_random_programs(way: Way, seeds: range) -> None:
    check(way, seeds, changes=True)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [False, True], ids=["pure", "in_place"])
@pytest.mark.parametrize("start", range(0, 1000, CHUNK))
@pytest.mark.parametrize(("way", "first"), [(trained, 1000), (in_evaluation, 2000), (in_a_stream, 3000)])
def test_many_random_programs(way: Way, first: int, start: int, changes: bool) -> None:
    check(way, range(first + start, first + start + CHUNK), changes)
