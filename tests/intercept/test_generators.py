"""What is left alone draws nothing, or nothing is left alone from the next batch on."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pipe.intercept.generators import Draws, LibraryGenerators, TorchGenerators
from lightning_pipe.intercept.random_streams import RandomStreams

CPU = torch.device("cpu")
LIBRARIES, TORCH = LibraryGenerators(), TorchGenerators(CPU)
DRAWS: list[Callable[[], object]] = [
    random.random,
    lambda: random.gauss(0.0, 1.0),  # made in pairs: the second is kept
    lambda: random.sample(range(1000), 700),
    np.random.random,
    np.random.normal,
    lambda: np.random.permutation(700).tolist(),
    lambda: np.random.seed(3),
]
OF_TORCH: list[Callable[[], object]] = [
    lambda: torch.rand(()).item(),
    lambda: torch.randn(1).item(),  # the second one of a pair is kept
    lambda: torch.randperm(700).tolist(),
    lambda: torch.rand(624).tolist(),  # as many as the generator makes at once
    lambda: torch.randn(32, dtype=torch.float64).tolist(),
    lambda: torch.bernoulli(torch.tensor(0.5)).item(),
    lambda: torch.manual_seed(3).initial_seed(),
]
EVERY: list[tuple[Any, Callable[[], object]]] = [
    *((LIBRARIES, draw) for draw in DRAWS),
    *((TORCH, draw) for draw in OF_TORCH),
]
PAIRS = [(of, first, draw) for of, first in EVERY for other, draw in EVERY if of is other]


def state_of(generators: Any) -> bytes:
    states = generators.states()
    return pickle.dumps([each.tolist() for each in states] if generators is TORCH else states)


@pytest.mark.parametrize(("generators", "first", "draw"), PAIRS)
def test_what_is_restored_is_what_was_read(
    generators: Any, first: Callable[[], object], draw: Callable[[], object]
) -> None:
    def numbers() -> list[object]:
        drawn = draw()
        if generators is TORCH:
            return [drawn, torch.randn(()).item()]
        return [drawn, random.gauss(0.0, 1.0), np.random.normal()]

    first()
    before, known = generators.states(), state_of(generators)
    drawn = numbers()
    assert state_of(generators) != known
    generators.restore(before)
    assert state_of(generators) == known
    assert numbers() == drawn


@pytest.mark.parametrize(("generators", "draw"), EVERY)
def test_every_draw_is_found(generators: Any, draw: Callable[[], object]) -> None:
    generators.seed(1 << 40)
    assert not generators.moved_since(1 << 40)
    generators.seed(1 << 40)
    draw()
    assert generators.moved_since(1 << 40)


class Rank:
    """One rank that runs batches of one run each."""

    def __init__(self) -> None:
        self.draws = Draws(LIBRARIES)

    def run(self, *drawing: int, calls: Sequence[int] = (0, 1, -1), around: bool = False) -> set[int]:
        """Run a batch in which some calls draw. Returns which of its calls were left alone."""
        batch, quiet = self.draws.begin_batch()
        LIBRARIES.seed(7)
        for call in calls:
            if call not in quiet:
                before = LIBRARIES.states()
                LIBRARIES.seed(call & 0xFF)
            if call in drawing:
                random.random()
            if call not in quiet:
                self.draws.watch(call, batch, call & 0xFF)
                LIBRARIES.restore(before)
        if around:
            np.random.random()
        self.draws.end_run(7)
        return set(calls) & quiet


def quiet_rank() -> Rank:
    rank = Rank()
    for _ in range(3):
        assert rank.run() == set()
    assert rank.run() == {0, 1, -1}
    return rank


def test_what_draws_in_its_first_batches_is_never_left_alone() -> None:
    rank = Rank()
    rank.run(0)
    rank.run()
    rank.run(1)
    assert rank.run() == rank.run() == {-1}


def test_batches_count_that_call_a_layer() -> None:
    rank = Rank()
    for _ in range(4):
        rank.run(calls=[0])
    for _ in range(3):
        assert rank.run() == {0}
    assert rank.run() == {0, 1, -1}


def test_batches_begin_before_others_end() -> None:
    draws = Draws(LIBRARIES)
    begun = [draws.begin_batch() for _ in range(5)]
    assert all(not quiet for _, quiet in begun)
    LIBRARIES.seed(1)
    for number, _ in begun[:2] * 2:  # several micro-batches
        draws.watch(0, number, 1)
        LIBRARIES.seed(1)
    assert draws.begin_batch()[1] == set()
    draws.watch(0, begun[2][0], 1)
    assert draws.begin_batch()[1] == {0}


def test_keys_belong_to_calls() -> None:
    watched: list[int] = []

    class Watching(Draws):
        def watch(self, call: int, batch: int, seed: int) -> None:
            watched.append(call)

    streams = RandomStreams(0, CPU, draws=[Watching(LIBRARIES)])
    for key in ((0, 0), (2, 0), (2, 1), (-1, 5), (-1, 5, 0), (-4,)):  # of -1: code outside, and hooks inside
        with streams.isolated(0, *key):
            pass
    assert watched == [0, 2, 2, -4]


def test_nothing_is_left_alone_if_code_around_the_layers_draws() -> None:
    rank = Rank()
    for _ in range(6):
        assert rank.run(around=True) == set()


@pytest.mark.parametrize("calls", [[0], [1], [-1], [0, 1], []])
def test_nothing_is_left_alone_once_some_have_begun_to_draw_later(calls: list[int]) -> None:
    rank = quiet_rank()
    assert rank.run(*calls, around=not calls) == {0, 1, -1}  # those that this batch has left alone so far
    for _ in range(4):
        assert rank.run(*calls, around=not calls) == set()


def test_one_number_of_another_thread_costs_time_alone() -> None:
    rank = quiet_rank()
    rank.run(around=True)
    for _ in range(4):
        assert rank.run() == set()
