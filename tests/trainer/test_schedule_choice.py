"""``schedule="auto"``: chosen before the run, the same on all ranks."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_pipe import CostProfile, PipeStrategy
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.partition import find_layers
from lightning_pipe.planning.cost_profile import SizeCosts
from lightning_pipe.planning.layer_sizes import profile_path, without_times
from lightning_pipe.profiling.measure import run_conditions
from lightning_pipe.simulate import Link
from lightning_pipe.trainer import schedule_choice
from lightning_pipe.trainer.schedule_choice import choose, label, memory_of_a_process, same_everywhere
from tests.support.lit_modules import Data, Lit
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET

CPU = torch.device("cpu")


def store(
    module: nn.Module, folder: Path, *, message: float, reduce: float = 0, saved: float = 1.0, **conditions: str
) -> CostProfile:
    """A profile where `choose` finds it, with these latencies; a layer takes a millisecond forward."""
    layers = find_layers(module)
    path, sizes = profile_path(module, layers), without_times(module, layers).layers
    times = (0.001,) * len(sizes)
    costs = SizeCosts(times, tuple(2 * each for each in times), times, (saved,) * len(sizes), (1.0,) * len(sizes))
    profile = CostProfile(type(module).__name__, sizes, {1: costs}, Link(message), Link(reduce), conditions=conditions)
    assert path.parent == folder
    profile.save(path)
    return profile


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_PIPE_CACHE", str(tmp_path))
    return tmp_path


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))


def chosen(module: nn.Module, ranks: int, *, in_parts: bool = False, **options: Any) -> PipeStrategy:
    """Such a strategy with the schedule that is chosen for it."""
    strategy = PipeStrategy(schedule="auto", **options)
    choose(module, strategy, ranks, CPU, in_parts=in_parts)
    return strategy


def test_the_choice_follows_the_stored_profile(cache: Path) -> None:
    by_parameters = chosen(net(), 4, micro_batches=4)
    assert by_parameters.family.synchronous
    assert "By the layers' parameters" in by_parameters.chosen_by
    store(net(), cache, message=1e-9)
    cheap = chosen(net(), 4, micro_batches=4)
    store(net(), cache, message=0.02)
    dear = chosen(net(), 4, micro_batches=4)
    assert str(cache) in cheap.chosen_by
    assert cheap.family.label in cheap.chosen_by
    # where messages are dear, the schedules with several stages on a rank and more messages fall behind
    assert cheap.family != dear.family
    assert dear.family.stages_per_rank == 1


def test_what_does_not_fit_is_computed_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def within(memory: float, recompute: Any = "never") -> PipeStrategy:
        monkeypatch.setattr(schedule_choice, "memory_of_a_process", lambda *_: memory)
        return chosen(net(), 4, micro_batches=8, recompute=recompute)

    store(net(), cache, message=1e-9, saved=1e6)
    assert within(1e12).recompute == "never"
    # schedules that hold a half and a third of the activations come before recomputation
    assert label(within(7e6)) == "zero_bubble variant=v_half"
    assert label(within(5e6)) == "zero_bubble variant=v_min"
    few = within(3e6)
    assert few.recompute == "always"
    assert label(few).endswith("recompute")
    with pytest.raises(ConfigurationError, match=r"(?s)Nothing fits into.*Use more ranks"):
        within(1e6)
    assert within(1e12, "except_last").recompute == "except_last"
    # Of activations only a measured profile knows.
    store(net(), cache, message=1e-9, saved=1e6, threads="77")
    assert within(3e6).recompute == "never"


def test_no_stage_is_computed_on_two_ranks_where_parameters_are_divided(cache: Path) -> None:
    store(net(), cache, message=1e-9)
    assert chosen(net(), 4, micro_batches=8).family.name == "dualpipe"
    assert chosen(net(), 4, micro_batches=8, in_parts=True).family.name == "dualpipev"


def test_the_memory_of_a_process() -> None:
    assert memory_of_a_process(CPU, 4) == memory_of_a_process(CPU, 1) / 4 > 1e6


def test_a_profile_of_other_conditions_is_not_used_and_that_is_said(cache: Path) -> None:
    store(net(), cache, message=1e-9, threads="77")
    reason = chosen(net(), 4).chosen_by
    assert f"threads 77 in the profile, {run_conditions(CPU)['threads']} now" in reason


def test_one_rank_needs_no_choice_and_layers_must_be_there() -> None:
    assert chosen(net(), 1).family.name == "1f1b"
    with pytest.raises(ConfigurationError, match="looks at the layers before the run"):
        chosen(nn.Linear(2, 2), 2)
    with pytest.raises(ConfigurationError, match="chooses the stages of one pass, got stages=4"):
        PipeStrategy(schedule="auto", stages=4)
    with pytest.raises(ConfigurationError, match=r"balance=\[2, 2\](.|\n)*name a schedule"):
        PipeStrategy(schedule="auto", balance=[2, 2])


def test_ranks_that_choose_differently_are_refused() -> None:
    same_everywhere("gpipe", "gpipe")
    with pytest.raises(ConfigurationError, match="rank 0 chooses 1f1b, this rank gpipe"):
        same_everywhere("gpipe", "1f1b")


def train(process: int, folder: str) -> tuple[str, str]:
    """The schedule that a run chooses, and what it prints."""
    own = Path(folder) / str(process)  # a folder each: nobody reads what another is writing
    os.environ["LIGHTNING_PIPE_CACHE"] = str(own)
    torch.set_default_dtype(torch.float64)
    store(Lit(), own, message=1e-9)
    strategy = PipeStrategy(schedule="auto", micro_batches=2, compare_losses=False)
    told, module = io.StringIO(), Lit()
    module.counts = False  # the schedule has several pipes
    with redirect_stdout(told):
        L.Trainer(**QUIET, max_epochs=1, strategy=strategy, devices=2).fit(module, Data(16).train_dataloader())
    return strategy.family.label, told.getvalue()


@pytest.mark.timeout(90)
def test_a_run_trains_by_the_choice_and_its_plan_says_it(tmp_path: Path) -> None:
    (label, told), (of_other, _) = run_trainers(train, 2, timeout=80, folder=str(tmp_path))
    assert label == of_other
    assert f"schedule chosen: {label}" in " ".join(told.split())
