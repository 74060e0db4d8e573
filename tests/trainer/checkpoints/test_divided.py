"""Checkpoints: ordinary files, on any number of stages and replicas, and folders."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_pipe.trainer.checkpoints.entries import Owners, gather, plain_name
from lightning_pipe.transport.base import Transport
from lightning_pipe.transport.topology import Topology
from tests.support import oracle
from tests.support.checkpoint_runs import EPOCHS, of_four, of_two, run
from tests.support.lit_modules import Lit
from tests.support.processes import in_turn
from tests.support.threads import run_threads, thread_world

Traces = dict[str, list[oracle.Trace]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def plain(folder: Path) -> oracle.Trace:
    return run(None, save=folder / "plain")


@pytest.fixture(scope="module")
def averaged(folder: Path) -> oracle.Trace:
    return run(None, save=folder / "averaged_plain", averaged=True)


@pytest.fixture(scope="module")
def four(folder: Path) -> Traces:
    return in_turn(of_four(folder), 4)


@pytest.fixture(scope="module")
def two(folder: Path, four: Traces, averaged: oracle.Trace) -> Traces:
    return in_turn(of_two(folder), 2)


def assert_continues(found: oracle.Trace, unbroken: oracle.Trace) -> None:
    """The epochs after the break are those of the unbroken run."""
    left = len(unbroken.losses) // EPOCHS * (EPOCHS - 1)
    assert len(found.losses) == left
    expected = oracle.Trace(unbroken.losses[-left:], {**unbroken.weights}, [], unbroken.metrics)
    oracle.assert_equal(oracle.Trace(found.losses, found.weights, [], found.metrics), expected)


@pytest.mark.feature("Callbacks", "ModelCheckpoint", "works")
@pytest.mark.feature("Callbacks", "Checkpoint", "works")
@pytest.mark.parametrize("name", ["saved", "saved_folder"])
def test_saving_changes_nothing(name: str, four: Traces, plain: oracle.Trace) -> None:
    for trace in four[name]:
        oracle.assert_equal(trace, plain)


@pytest.mark.feature("Checkpoints", "resuming on another number of ranks, with another schedule", "works")
@pytest.mark.parametrize("name", ["two", "folder_two"])
def test_two_processes_continue(name: str, two: Traces, plain: oracle.Trace) -> None:
    for trace in two[name]:
        assert_continues(trace, plain)


@pytest.mark.feature("Checkpoints", "resuming on one plain device", "works")
def test_one_plain_device_continues(folder: Path, four: Traces, plain: oracle.Trace) -> None:
    assert_continues(run(None, resume=folder / "four" / "epoch=0.ckpt"), plain)


@pytest.mark.feature("Checkpoints", "one ordinary file of the whole model", "works")
@pytest.mark.feature("Plugins", "TorchCheckpointIO", "works")
@pytest.mark.parametrize("name", ["epoch=1.ckpt", "last.ckpt", "after.ckpt"])
def test_the_file_is_that_of_one_device(name: str, folder: Path, four: Traces, plain: oracle.Trace) -> None:
    ours = torch.load(folder / "four" / name, weights_only=False)
    theirs = torch.load(folder / "plain" / name, weights_only=False)
    assert list(ours) == list(theirs)
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters"):
        assert_same(ours[part], theirs[part])
    assert ours["loops"]["fit_loop"]["epoch_progress"] == theirs["loops"]["fit_loop"]["epoch_progress"]


@pytest.mark.feature("Checkpoints", "load_from_checkpoint without this package's strategy", "works")
def test_the_file_needs_nothing_of_ours(folder: Path, four: Traces) -> None:
    path = folder / "four" / "last.ckpt"
    torch.load(path, weights_only=True)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    module = Lit.load_from_checkpoint(path, weights_only=False)
    assert module.hparams.width == 16
    assert not list(path.parent.glob("*.part"))


@pytest.mark.feature("Checkpoints", "a folder of torch.distributed.checkpoint", "works", "a part by each rank")
def test_the_folder_holds_parts_of_all_ranks(folder: Path, four: Traces) -> None:
    names = {path.name for path in (folder / "parts" / "last.ckpt").iterdir()}
    assert {f"__{process}_0.distcp" for process in range(4)} < names


@pytest.mark.feature("Plugins", "AsyncCheckpointIO", "works")
@pytest.mark.feature("Plugins", "CheckpointIO", "works")
def test_plugins_that_write_get_everything(folder: Path, two: Traces) -> None:
    ours = torch.load(folder / "averaged" / "epoch=1.ckpt", weights_only=False)
    theirs = torch.load(folder / "averaged_plain" / "epoch=1.ckpt", weights_only=False)
    for part in ("state_dict", "optimizer_states", "current_model_state", "averaging_state"):
        assert_same(ours[part], theirs[part])


@pytest.mark.feature("Checkpoints", "averaged weights", "works")
def test_averaged_weights_continue(two: Traces, averaged: oracle.Trace) -> None:
    for trace in two["averaged_again"]:
        assert_continues(trace, averaged)


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal in structure, and in values up to rounding."""
    for one, other in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one == pytest.approx(other) if isinstance(other, float) else one == other


# ------------------------------------------------------------------ the parts


def test_names_with_the_prefixes_of_wrappers() -> None:
    names = {"model.0.weight"}
    assert plain_name("module.model.0.weight", names) == "model.0.weight"
    assert plain_name("module._orig_mod.model.0.weight", names) == "model.0.weight"
    assert plain_name("n_averaged", names) is None
    assert plain_name(3, names) is None


class Tied(nn.Module):
    """A weight under two names, and a part of a larger memory."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3, bias=False)
        self.other = nn.Linear(3, 3, bias=False)
        self.other.weight = self.one.weight
        self.register_buffer("view", torch.arange(1000.0)[3:9])


def test_what_a_rank_contributes() -> None:
    """Tied weights once, averages by the names in them, no memory around a view; shapes that differ are no copies."""
    module = Tied()
    owners = Owners(module, lambda name: (1,) if name == "view" else (0, 1), [[], [(0, 0)]], writer=0)
    state = module.state_dict()
    checkpoint = {
        "state_dict": state,
        "average": [{"module.view": torch.ones(6), "n": 3}],
        "other": {"view": torch.ones(2)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"params": [0]}]}],
    }
    zero, one = (owners.entries(checkpoint, rank) for rank in (0, 1))
    assert [paths for paths, _ in zero] == [
        [("state_dict", "one.weight"), ("state_dict", "other.weight")],
        [("other", "view")],
    ]
    assert [paths for paths, _ in one] == [
        [("optimizer_states", 0, "state", 0)],
        [("state_dict", "view")],
        [("average", 0, "module.view")],
    ]
    assert one[1][1].untyped_storage().nbytes() == 24
    assert owners.have_states(0)
    assert not owners.have_states(1)


def large_on_two(transport: Transport) -> dict[str, Any] | None:
    """A checkpoint with a tensor of several pieces, tied, of the rank that does not write."""
    module = nn.ModuleDict({"a": nn.Linear(1 << 12, 1 << 11, bias=False), "b": nn.Linear(1 << 12, 1 << 11, bias=False)})
    module["b"].weight = module["a"].weight
    nn.init.constant_(module["a"].weight, float(transport.rank))
    owners = Owners(module, lambda _: (1,), [[], []], writer=0)
    state = module.state_dict()
    found = gather({"state_dict": state, "kept": {"x": 1}}, owners, transport)
    assert state["a.weight"][0, 0] == transport.rank
    return found


def test_the_rank_that_writes_gets_all() -> None:
    found, nothing = run_threads(thread_world(Topology(2)), large_on_two)
    assert nothing is None
    assert found is not None
    state = found["state_dict"]
    assert torch.equal(state["a.weight"], torch.ones(1 << 11, 1 << 12))
    assert state["a.weight"] is state["b.weight"]
    assert state._metadata[""] == {"version": 1}
    assert found["kept"] == {"x": 1}
