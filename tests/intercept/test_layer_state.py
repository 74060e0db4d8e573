"""What steps set in layers is put back, left, and had by other ranks; what calls keep is absent elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from lightning_pipe.intercept.absent_value import AbsentValue
from lightning_pipe.intercept.interceptor import ATTRIBUTES
from lightning_pipe.intercept.layer_state import LayerState
from lightning_pipe.intercept.snapshot import Change
from lightning_pipe.intercept.stage_run import under_way
from lightning_pipe.patches import all_replaced, replaced


class Keeps(nn.Module):
    """A layer, whose class is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.scale, self.items = 0, 1.0, [1.0]
        self.register_buffer("mean", torch.zeros(1))


class Rank:
    """A rank of two with two layers, which runs the stage of one of them.

    Args:
        stage: what it runs.
        one_pipe: whether all micro-batches take the same way.
    """

    def __init__(self, stage: int, *, one_pipe: bool = True) -> None:
        self.module = nn.ModuleDict({"a": Keeps(), "b": Keeps()})
        self.a: Any = self.module["a"]
        self.b: Any = self.module["b"]
        roots = [("a", self.a), ("b", self.b)]
        self.state = LayerState(self.module, roots, {"a": 0, "b": 1}, ["rank 0", "rank 1"], one_pipe=one_pipe)
        self.stage, self.own = stage, roots[stage][1]
        self.words: list[str] = []

    @contextmanager
    def run(self, *, complete: bool, behind: bool = False, thorough: bool = False) -> Iterator[None]:
        """A run of the step, in which the layer of this rank runs."""
        digest = SimpleNamespace(count=lambda name, value: self.words.append(name), thorough=thorough)
        run: Any = SimpleNamespace(
            complete=complete,
            stage_here=self.stage,
            tracker=SimpleNamespace(digest=digest, alone=False),
            skipped_layers=SimpleNamespace(modules=[self.a, self.b] if behind else [self.a]),
        )
        run.layer_calls = SimpleNamespace(
            ran=[],
            has_run=lambda part: part is self.own,
            setting=lambda run, *what: self.state.setting(run, *what) if self.state.counts(*what) else None,
        )
        self.state.runs(self.own, self.stage)
        with all_replaced(ATTRIBUTES), replaced(under_way, "run", run, gated=False), self.state.of_run(run):
            yield


def test_what_a_complete_run_sets_the_other_ranks_have_behind_the_batch() -> None:
    first, last = Rank(0), Rank(1)
    with last.run(complete=True):
        last.a.scale = 2.0
        last.a.mean = torch.ones(1)
        last.b.eval()
        last.a.hook = print  # no data
    last.a.late = 1  # in no step
    changes = last.state.take()
    assert last.state.take() == []
    assert all(map(first.state.adopt, changes))
    assert (first.a.scale, first.b.training, first.a.mean.tolist()) == (2.0, False, [1.0])
    assert not {"hook", "late"} & {*vars(first.a)}
    assert last.words == ["self.a.scale", "self.a.mean", "self.b.training"]


class Early(nn.Module):
    """Sets an attribute before it can tell its hash, as metrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 3
        self.whole = True

    def __hash__(self) -> int:
        return hash(self.whole)


def test_a_run_may_make_a_module_that_cannot_tell_its_hash_yet() -> None:
    with Rank(1).run(complete=True):
        assert Early().size == 3


def test_a_run_that_ends_early_puts_back_what_it_has_set() -> None:
    rank = Rank(0)
    with suppress(KeyboardInterrupt), rank.run(complete=False):
        rank.a.scale, rank.a.new = 2.0, 3.0
        rank.b.eval()
        raise KeyboardInterrupt
    assert (rank.a.scale, rank.b.training, hasattr(rank.a, "new")) == (1.0, True, False)
    assert rank.state.take() == []


def test_a_second_run_finds_what_the_first_one_has_found() -> None:
    rank = Rank(1)
    unset, first = rank.state.begin_first(), rank.state.begin_first()
    for _ in range(2):
        with rank.run(complete=True):
            rank.b.scale *= 0.5
    for run in (unset, first):
        with rank.state.restored(run):
            assert rank.b.scale == 1.0
    assert rank.b.scale == 0.25


def test_what_has_changed_behind_a_layer_is_not_what_its_next_call_computes_with() -> None:
    rank = Rank(1)
    with rank.run(complete=True):
        rank.a.scale = 2.0
    with rank.run(complete=True):
        rank.state.check_called("b", rank.b)
        with pytest.raises(CutError, match=r"the step changes `self\.a\.scale` behind 'a', whose stage has begun"):
            rank.state.check_called("a", rank.a)
    with rank.run(complete=True):
        rank.a.scale = 3.0
        rank.state.check_called("a", rank.a)
    rank.state.take()
    with pytest.raises(CutError, match="behind 'a'"), rank.run(complete=True):
        rank.state.check_called("a", rank.a)  # other batches are under way
    rank.state.begin_batch()
    with rank.run(complete=True):
        rank.state.check_called("a", rank.a)


def test_what_ends_at_its_former_value_has_not_changed() -> None:
    rank = Rank(1)
    with rank.run(complete=True):
        rank.a.eval()
        rank.a.train()
        rank.a.items = [1.0]
    with rank.run(complete=True):
        rank.state.check_called("a", rank.a)
    assert rank.state.take() == []


def test_in_several_pipes_a_run_may_change_nothing() -> None:
    rank = Rank(1, one_pipe=False)
    with rank.run(complete=True):
        rank.a.eval()
        rank.a.train()
    with (
        pytest.raises(CutError, match=r"the step changes `self\.a\.scale`, and this schedule has several pipes"),
        rank.run(complete=True),
    ):
        rank.a.scale = 2.0


def test_what_layers_hold_must_not_change_in_place() -> None:
    rank = Rank(1)
    with (
        pytest.raises(CutError, match=r"the step changes what `self\.a\.items` refers to"),
        rank.run(complete=True, thorough=True),
    ):
        rank.a.items.append(2.0)
    rank = Rank(1)
    rank.state.around = {"": SimpleNamespace(own=rank.a.items)}  # type: ignore[dict-item]
    with rank.run(complete=True, thorough=True):
        rank.a.items.append(2.0)  # all ranks get it with what the LightningModule has


def test_a_buffer_that_another_rank_has_is_not_set_by_its_own_value() -> None:
    rank = Rank(1)
    rank.a._buffers["mean"] = AbsentTensor.like(torch.zeros(1))
    with pytest.raises(CutError, match=r"sets the buffer `self\.a\.mean` by its own value"), rank.run(complete=True):
        rank.a.mean = rank.a.mean * 2


# ------------------------------------------------------------------ what calls keep


def test_what_calls_keep_is_absent_where_they_are_answered() -> None:
    rank = Rank(1)
    assert rank.state.kept(rank.a) == ()
    rank.state.answered(rank.a, [("", "calls"), ("", "items")], {("", "items")})
    assert rank.state.kept(rank.a) == (("", "calls"), ("", "items"))
    assert isinstance(rank.a.calls, AbsentValue)
    assert rank.a.items == [1.0], "the call has set it for the time of the run"
    with pytest.raises(CutError, match=r"`self\.a\.calls` is read where it has no value: .* and rank 0 has it"):
        rank.a.calls += 1
    changes = rank.state.take()
    assert isinstance(rank.a.items, AbsentValue), "hooks come next"
    first = Rank(0)
    first.state.runs(first.a, 0)
    assert all(map(first.state.adopt, changes))
    assert first.a.calls == 0
    between = Rank(0)
    assert all(map(between.state.adopt, changes))
    assert isinstance(between.a.calls, AbsentValue)


def test_behind_the_stage_that_keeps_it_a_step_must_not_set_it() -> None:
    rank = Rank(1)
    rank.state.answered(rank.a, [("", "calls")], ())
    with (
        pytest.raises(CutError, match=r"changes `self\.a\.calls` behind the layers of its stage, which keeps it"),
        rank.run(complete=True, behind=True),
    ):
        rank.a.calls = 0


def test_other_stages_of_the_rank_do_not_see_it() -> None:
    rank = Rank(1)
    rank.state.runs(rank.a, 0)
    rank.state.keep(rank.a, "calls")
    with rank.run(complete=True):
        assert isinstance(rank.a.calls, AbsentValue)
        assert rank.b.calls == 0
    assert rank.a.calls == 0


def test_a_module_that_is_whole_again_has_it_on_all_ranks() -> None:
    first, last = Rank(0), Rank(1)
    first.state.runs(first.a, 0)
    first.a.calls, first.a.items = 3, [lambda: None]  # which cannot be sent
    for name in ("calls", "items"):
        first.state.keep(first.a, name)
        last.state.adopt(Change("hide", ("a", name)))
    given: list[Any] = []
    first.state.share(lambda own: given.append(own) or [own])
    last.state.share(lambda own: [own, *given])
    assert last.a.calls == 3
    assert isinstance(last.a.items, AbsentValue)
