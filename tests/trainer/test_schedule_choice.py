"""``schedule="auto"``: chosen before the run, the same on all ranks, and kept by runs that resume."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_pipe import CostProfile, PipeStrategy, schedules
from lightning_pipe.errors import ConfigurationError, PartitionError
from lightning_pipe.partition import find_layers
from lightning_pipe.planning.cost_profile import SizeCosts
from lightning_pipe.planning.profile_store import ProfileStore
from lightning_pipe.profiling.measure import run_conditions
from lightning_pipe.simulate import Link
from lightning_pipe.trainer import schedule_choice
from lightning_pipe.trainer.schedule_choice import (
    KEY,
    ScheduleChoice,
    checkpoint_of,
    choose,
    kept,
    memory_of_a_process,
    same_everywhere,
)
from tests.support.lit_modules import Data, Lit
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET

CPU = torch.device("cpu")


def store(
    module: nn.Module, folder: Path, *, message: float, reduce: float = 0, saved: float = 1.0, **conditions: str
) -> CostProfile:
    """A profile where `choose` finds it, with these latencies; a layer takes a millisecond forward."""
    kept_in = ProfileStore(module, find_layers(module), {})
    sizes = kept_in.module.layers
    times = (0.001,) * len(sizes)
    costs = SizeCosts(times, tuple(2 * each for each in times), times, (saved,) * len(sizes), (1.0,) * len(sizes))
    profile = CostProfile(type(module).__name__, sizes, {1: costs}, Link(message), Link(reduce), conditions=conditions)
    assert kept_in.path.parent == folder
    profile.save(kept_in.path)
    return profile


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_PIPE_CACHE", str(tmp_path))
    return tmp_path


def net() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))


def test_the_choice_follows_the_stored_profile(cache: Path) -> None:
    by_parameters = choose(net(), None, 4, 4, CPU)
    assert by_parameters.family.synchronous
    assert "By the layers' parameters" in by_parameters.reason
    store(net(), cache, message=1e-9)
    cheap = choose(net(), None, 4, 4, CPU)
    store(net(), cache, message=0.02)
    dear = choose(net(), None, 4, 4, CPU)
    assert str(cache) in cheap.reason
    assert cheap.family.label in cheap.reason
    # where messages are dear, the schedules with several stages on a rank and more messages fall behind
    assert cheap.family != dear.family
    assert dear.family.stages_per_rank == 1


def test_what_does_not_fit_is_computed_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(memory: float, recompute: Any = "never") -> ScheduleChoice:
        monkeypatch.setattr(schedule_choice, "memory_of_a_process", lambda *_: memory)
        return choose(net(), None, 4, 8, CPU, recompute=recompute)

    store(net(), cache, message=1e-9, saved=1e6)
    assert chosen(1e12).recompute == "never"
    # schedules that hold a half and a third of the activations come before recomputation
    assert chosen(7e6).label == "zero_bubble variant=v_half"
    assert chosen(5e6).label == "zero_bubble variant=v_min"
    few = chosen(3e6)
    assert few.recompute == "always"
    assert few.label.endswith("recompute")
    none = chosen(1e6)
    assert none.recompute == "always"
    assert "Nothing fits into" in none.reason
    assert chosen(1e12, "except_last").recompute == "except_last"
    # Of activations only a measured profile knows.
    store(net(), cache, message=1e-9, saved=1e6, threads="77")
    assert chosen(3e6).recompute == "never"


def test_stages_are_predicted_as_the_run_will_cut_them(cache: Path) -> None:
    """A choice of two stages on each rank cannot be cut by the layers of four stages."""
    store(net(), cache, message=1e-9, reduce=10)
    assert choose(net(), None, 4, 8, CPU).family.stages_per_rank == 2
    even, uneven = (choose(net(), None, 4, 8, CPU, balance=each) for each in ([2] * 4, [5, 1, 1, 1]))
    assert even.family.stages_per_rank == uneven.family.stages_per_rank == 1

    def seconds(choice: ScheduleChoice) -> float:
        return float(choice.reason.split(": ")[1].split(" ms")[0])

    # the first stage has five of eight layers, each 3 ms for each of eight micro-batches
    assert seconds(uneven) >= 8 * 5 * 3 > seconds(even)
    assert choose(net(), None, 4, 8, CPU, balance=[1] * 8).family.stages_per_rank == 2
    with pytest.raises(ConfigurationError, match=r"balance=\[3, 3, 2\] has 3 stages, and a pipeline of 4 ranks"):
        choose(net(), None, 4, 8, CPU, balance=[3, 3, 2])
    with pytest.raises(PartitionError):
        choose(net(), None, 4, 8, CPU, balance=[3, 3, 3, 3])


def test_no_stage_is_computed_on_two_ranks_where_parameters_are_divided(cache: Path) -> None:
    store(net(), cache, message=1e-9)
    assert choose(net(), None, 4, 8, CPU).family.name == "dualpipe"
    assert choose(net(), None, 4, 8, CPU, in_parts=True).family.name == "dualpipev"


def test_the_memory_of_a_process() -> None:
    assert memory_of_a_process(CPU, 4) == memory_of_a_process(CPU, 1) / 4 > 1e6


def test_a_profile_of_other_conditions_is_not_used_and_that_is_said(cache: Path) -> None:
    store(net(), cache, message=1e-9, threads="77")
    reason = choose(net(), None, 4, "auto", CPU).reason
    assert f"threads 77 in the profile, {run_conditions(CPU)['threads']} now" in reason


def test_one_rank_needs_no_choice_and_layers_must_be_there() -> None:
    assert choose(net(), None, 1, "auto", CPU).family.name == "1f1b"
    with pytest.raises(ConfigurationError, match="looks at the layers before the run"):
        choose(nn.Linear(2, 2), None, 2, "auto", CPU)
    with pytest.raises(ConfigurationError, match="chooses the stages as well, got stages=4"):
        PipeStrategy(schedule="auto", stages=4)


def test_the_checkpoint_is_found_among_the_arguments_of_a_run() -> None:
    def fit(model: object, ckpt_path: object = None) -> None: ...

    assert checkpoint_of(fit, ["model", "a.ckpt"], {}) == "a.ckpt"
    assert checkpoint_of(fit, ["model"], {"ckpt_path": "b.ckpt"}) == "b.ckpt"
    assert checkpoint_of(fit, ["model"], {}) is None
    assert checkpoint_of(lambda: None, [], {}) is None


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble", "interleaved", "chimera"])
def test_a_choice_is_read_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    for family in schedules.get(name).variants():
        torch.save({KEY: ScheduleChoice(family, "", "always", shard_optimizer="gradients").stored(4)}, path)
        found = kept(path, 4)
        assert found is not None
        assert (found.family, found.recompute, found.shard_optimizer) == (family, "always", "gradients")
        assert str(path) in found.reason
        assert kept(path, 3) is None  # a pipeline of another length asks again
    (tmp_path / "folder").mkdir()
    assert kept(tmp_path / "folder", 4) is None
    torch.save(torch.load(path, weights_only=False), tmp_path / "folder" / "meta.pt")
    assert kept(tmp_path / "folder", 4) == ScheduleChoice(
        family, f"kept from {tmp_path / 'folder'}", "always", shard_optimizer="gradients"
    )
    torch.save({KEY: {"name": "1f1b", "options": {}}}, path)
    assert kept(path, 4) == ScheduleChoice(schedules.get("1f1b"), f"kept from {path}")
    torch.save({"epoch": 1}, path)
    assert kept(path, 4) is None
    assert kept("last", 4) is None
    assert kept(None, 4) is None


def test_ranks_that_choose_differently_are_refused() -> None:
    choice = ScheduleChoice(schedules.get("gpipe"), "")
    same_everywhere(choice, "gpipe")
    with pytest.raises(ConfigurationError, match="rank 0 chooses 1f1b, this rank gpipe"):
        same_everywhere(choice, "1f1b")


class _OneEpoch(L.Callback):
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = True


def train(process: int, folder: str) -> dict[str, Any]:
    """Train by one profile; store another, by which another schedule would be chosen; resume, and train anew."""
    found: dict[str, Any] = {}
    path = str(Path(folder) / "last.ckpt")
    own = Path(folder) / str(process)  # a folder each: nobody reads what another is writing
    os.environ["LIGHTNING_PIPE_CACHE"] = str(own)
    torch.set_default_dtype(torch.float64)

    def fit(name: str, ckpt_path: str | None, callbacks: list[L.Callback]) -> L.Trainer:
        strategy, told = PipeStrategy(schedule="auto", micro_batches=2), io.StringIO()
        options = {**QUIET, "max_epochs": 2, "callbacks": callbacks, "enable_checkpointing": ckpt_path is not None}
        trainer = L.Trainer(**options, strategy=strategy, devices=2)
        module = Lit()
        module.counts = False  # one of the schedules has several pipes
        with redirect_stdout(told):
            trainer.fit(module, Data(), ckpt_path=ckpt_path)
        found[name] = strategy.family.label, told.getvalue()
        return trainer

    store(Lit(), own, message=1e-9)
    fit("first", None, [_OneEpoch()]).save_checkpoint(path)
    store(Lit(), own, message=1e-9, reduce=10)  # two copies of the weights cost much
    fit("resumed", "last", [ModelCheckpoint(folder, save_top_k=0, save_last=True)])
    fit("anew", None, [_OneEpoch()])
    return found


@pytest.mark.timeout(150)
def test_a_resumed_run_keeps_the_choice(tmp_path: Path) -> None:
    first, second = run_trainers(train, 2, timeout=140, folder=str(tmp_path))
    labels = {name: label for name, (label, _) in first.items()}
    assert labels == {name: label for name, (label, _) in second.items()}
    assert labels["resumed"] == labels["first"] != labels["anew"]
    assert f"schedule chosen: {labels['first']}" in " ".join(first["first"][1].split())
    assert "kept from" in first["resumed"][1]
