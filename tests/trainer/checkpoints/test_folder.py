"""Folders of shards have the layout of Lightning's strategies: its own command makes ordinary checkpoints of them."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from lightning_pipe.errors import CheckpointError
from lightning_pipe.parameters.loading import load_weights
from lightning_pipe.trainer.checkpoints import folder
from tests.support import oracle
from tests.support.checkpoint_runs import run
from tests.support.lit_modules import Data, Lit
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet
from tests.trainer.checkpoints.test_divided import assert_same

COMMAND = "lightning.pytorch.utilities.consolidate_checkpoint"


def consolidate(source: Path, target: Path) -> dict[str, Any]:
    """What ``python -m`` with Lightning's module writes."""
    before = sys.argv
    sys.argv = [COMMAND, str(source), "--output_file", str(target)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it reads without processes, and says so
            runpy.run_module(COMMAND, run_name="__main__")
    finally:
        sys.argv = before
    found: dict[str, Any] = torch.load(target, weights_only=True)
    return found


class Plain(Lit):
    """Its optimizer keeps nothing of any parameter."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def in_two(process: int, path: Path) -> dict[str, oracle.Trace]:
    options = {"save_distributed_checkpoint": True}
    traces = {"saved": run(2, save=path / "parts", **options)}
    traces["consolidated"] = run(2, resume=consolidated_once(process, path), schedule="gpipe")
    without_states(path)
    return traces


def consolidated_once(process: int, path: Path) -> Path:
    """One process makes a file of a folder."""
    target = path / "first.ckpt"
    if process == 0:
        consolidate(path / "parts" / "epoch=0.ckpt", target.with_name("writing"))
        target.with_name("writing").rename(target)
    torch.distributed.barrier()
    return target


def without_states(path: Path) -> None:
    from lightning_pipe import PipeStrategy

    quiet()
    for number, resume in enumerate((None, path / "0.ckpt")):
        strategy = PipeStrategy(micro_batches=1, save_distributed_checkpoint=True)
        trainer = L.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_epochs=number + 1, limit_val_batches=0, **QUIET
        )
        trainer.fit(Plain().double(), Data(16), ckpt_path=resume, weights_only=False if resume else None)
        trainer.save_checkpoint(path / f"{number}.ckpt")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def two(path: Path) -> list[dict[str, oracle.Trace]]:
    return run_trainers(in_two, 2, timeout=90, path=path)


def test_the_command_of_lightning_makes_an_ordinary_file(path: Path, two: list[dict[str, oracle.Trace]]) -> None:
    plain = run(None, save=path / "plain")
    for traces in two:
        oracle.assert_equal(traces["saved"], plain)
    ours = consolidate(path / "parts" / "last.ckpt", path / "last.ckpt")
    theirs = torch.load(path / "plain" / "last.ckpt", weights_only=True)
    assert ours.keys() == theirs.keys()
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value)
    for part in ("lr_schedulers", "hyper_parameters"):
        assert_same(ours[part], theirs[part])
    module = Lit.load_from_checkpoint(path / "last.ckpt", weights_only=False)
    torch.testing.assert_close(module.state_dict(), theirs["state_dict"], check_dtype=False)


def test_runs_resume_from_that_file(path: Path, two: list[dict[str, oracle.Trace]]) -> None:
    """On one plain device and on two stages, with the states of optimizers: as from the file of one device."""
    run(None, save=path / "plain")
    resumed = run(None, resume=path / "plain" / "epoch=0.ckpt")
    oracle.assert_equal(run(None, resume=path / "first.ckpt"), resumed)
    for traces in two:
        oracle.assert_equal(traces["consolidated"], resumed)


@pytest.mark.parametrize("number", [0, 1])
def test_optimizers_that_keep_nothing(number: int, path: Path, two: list[dict[str, oracle.Trace]]) -> None:
    found = consolidate(path / f"{number}.ckpt", path / f"bare{number}.ckpt")
    assert found["optimizer_states"][0]["state"] == {}
    module = Plain().double()
    trainer = L.Trainer(accelerator="cpu", max_epochs=3, limit_val_batches=0, **QUIET)
    trainer.fit(module, Data(16), ckpt_path=path / f"bare{number}.ckpt", weights_only=False)
    assert trainer.current_epoch == 3


def test_weights_are_loaded_by_name(path: Path, two: list[dict[str, oracle.Trace]]) -> None:
    module = Lit().double()
    load_weights(module, path / "parts" / "last.ckpt")
    run(None, save=path / "plain")
    torch.testing.assert_close(
        module.state_dict(), torch.load(path / "plain" / "last.ckpt", weights_only=True)["state_dict"]
    )


def shards(path: Path, **rest: Any) -> Path:
    """A folder, with what is beside the shards."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_shards({"model": {"a": torch.ones(3)}}, checkpoint_id=path, no_dist=True)
    torch.save(rest, path / folder.REST)
    return path


def test_what_is_not_needed_is_not_read(tmp_path: Path) -> None:
    assert folder.load(str(shards(tmp_path, epoch=3)), lambda name: name != "a", None)["state_dict"]["a"].is_meta
    found = folder.load(str(tmp_path), lambda name: name == "a", None)
    assert found["state_dict"]["a"].sum() == 3
    assert found["epoch"] == 3


def test_folders_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    whole = shards(tmp_path / "broken")
    next(whole.glob("*.distcp")).write_bytes(b"tensors")
    with pytest.raises(CheckpointError, match=r"broken cannot be read: \w+"):
        folder.load(str(whole), lambda _: True, None)
    (whole / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match="broken cannot be read: EOFError"):
        folder.load(str(whole), lambda _: True, None)
    for name in (folder.REST, ".metadata"):
        (whole / name).unlink()
        with pytest.raises(CheckpointError, match=f"is no complete checkpoint: it has no .*{name}"):
            folder.load(str(whole), lambda _: True, None)
