"""Checkpoints: ordinary files, on any number of stages and replicas, and folders."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.serialization import get_crc32_options, set_crc32_options
from torch.utils._pytree import tree_leaves

from lightning_pipe.errors import CheckpointError
from lightning_pipe.trainer.checkpoints import file
from lightning_pipe.trainer.checkpoints.rank_entries import REMOVED, Pending, assembled, pieces, plain_name
from tests.support import oracle
from tests.support.checkpoint_runs import EPOCHS, in_four, in_two, run
from tests.support.lit_modules import Lit
from tests.support.processes import run_trainers

Traces = dict[str, oracle.Trace]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def plain(folder: Path) -> oracle.Trace:
    run(None, save=folder / "averaged_plain", averaged=True)
    return run(None, save=folder / "plain")


@pytest.fixture(scope="module")
def four(folder: Path, plain: oracle.Trace) -> list[Traces]:
    return run_trainers(in_four, 4, timeout=90, folder=folder)


@pytest.fixture(scope="module")
def two(folder: Path, four: list[Traces]) -> list[Traces]:
    return run_trainers(in_two, 2, timeout=60, folder=folder)


def assert_continues(found: oracle.Trace, unbroken: oracle.Trace) -> None:
    """The epochs after the break are those of the unbroken run."""
    left = len(unbroken.losses) // EPOCHS * (EPOCHS - 1)
    assert len(found.losses) == left
    expected = oracle.Trace(unbroken.losses[-left:], {**unbroken.weights}, [], unbroken.metrics)
    oracle.assert_equal(oracle.Trace(found.losses, found.weights, [], found.metrics), expected)


@pytest.mark.feature("Callbacks", "ModelCheckpoint", "works")
@pytest.mark.feature("Callbacks", "Checkpoint", "works")
@pytest.mark.parametrize("name", ["saved", "saved_folder"])
def test_saving_changes_nothing(name: str, four: list[Traces], plain: oracle.Trace) -> None:
    for traces in four:
        oracle.assert_equal(traces[name], plain)


@pytest.mark.parametrize("name", ["two_by_two", "folder_two_by_two", "from_plain"])
def test_four_processes_continue(name: str, four: list[Traces], plain: oracle.Trace) -> None:
    for traces in four:
        assert_continues(traces[name], plain)


@pytest.mark.feature("Checkpoints", "resuming on another number of ranks, with another schedule", "works")
@pytest.mark.parametrize("name", ["two", "folder_two"])
def test_two_processes_continue(name: str, two: list[Traces], plain: oracle.Trace) -> None:
    for traces in two:
        assert_continues(traces[name], plain)


@pytest.mark.feature("Checkpoints", "resuming on one plain device", "works")
def test_one_plain_device_continues(folder: Path, four: list[Traces], plain: oracle.Trace) -> None:
    assert_continues(run(None, resume=folder / "four" / "epoch=0.ckpt"), plain)


@pytest.mark.feature("Checkpoints", "one ordinary file of the whole model", "works")
@pytest.mark.feature("Plugins", "TorchCheckpointIO", "works")
@pytest.mark.parametrize("name", ["epoch=1.ckpt", "last.ckpt", "after.ckpt"])
def test_the_file_is_that_of_one_device(name: str, folder: Path, four: list[Traces]) -> None:
    ours = torch.load(folder / "four" / name, weights_only=False)
    theirs = torch.load(folder / "plain" / name, weights_only=False)
    assert list(ours) == list(theirs)
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters"):
        assert_same(ours[part], theirs[part])
    assert ours["loops"]["fit_loop"]["epoch_progress"] == theirs["loops"]["fit_loop"]["epoch_progress"]


@pytest.mark.feature("Checkpoints", "load_from_checkpoint without this package's strategy", "works")
def test_the_file_needs_nothing_of_ours(folder: Path, four: list[Traces]) -> None:
    path = folder / "four" / "last.ckpt"
    torch.load(path, weights_only=True)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    module = Lit.load_from_checkpoint(path, weights_only=False)
    assert module.hparams.width == 16
    assert not list(path.parent.glob("*.part"))


@pytest.mark.feature("Checkpoints", "a folder of torch.distributed.checkpoint", "works", "a part by each rank")
def test_the_folder_holds_parts_of_all_ranks(folder: Path, four: list[Traces]) -> None:
    names = {path.name for path in (folder / "parts" / "last.ckpt").iterdir()}
    assert {f"__{process}_0.distcp" for process in range(4)} < names


@pytest.mark.feature("Plugins", "AsyncCheckpointIO", "works")
@pytest.mark.feature("Plugins", "CheckpointIO", "works")
def test_plugins_that_write_get_everything(folder: Path, two: list[Traces]) -> None:
    ours = torch.load(folder / "background" / "epoch=1.ckpt", weights_only=False)
    theirs = torch.load(folder / "plain" / "epoch=1.ckpt", weights_only=False)
    for part in ("state_dict", "optimizer_states"):
        assert_same(ours[part], theirs[part])


def test_averaged_weights_come_from_their_owners(folder: Path, two: list[Traces]) -> None:
    ours = torch.load(folder / "averaged" / "epoch=1.ckpt", weights_only=False)
    theirs = torch.load(folder / "averaged_plain" / "epoch=1.ckpt", weights_only=False)
    for part in ("state_dict", "current_model_state", "averaging_state"):
        assert_same(ours[part], theirs[part])


@pytest.mark.feature("Checkpoints", "averaged weights", "works")
def test_averaged_weights_continue(folder: Path, two: list[Traces]) -> None:
    unbroken = run(None, averaged=True)
    for traces in two:
        assert_continues(traces["averaged_again"], unbroken)


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal in structure, and in values up to rounding."""
    for one, other in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other)
        else:
            assert one == pytest.approx(other) if isinstance(other, float) else one == other


# ------------------------------------------------------------------ the parts


def test_assembled_copies_what_it_changes_alone() -> None:
    state = OrderedDict(a=1, b=2)
    state._metadata = {"version": 1}  # type: ignore[attr-defined]
    kept = {"x": 1}
    tree = {"state": state, "list": [{"s": {}}, 1], "kept": kept}
    result = assembled(tree, [(("state", "a"), 5), (("list", 0, "s", 7), "new"), (("state", "b"), REMOVED)])
    assert result == {"state": {"a": 5}, "list": [{"s": {7: "new"}}, 1], "kept": {"x": 1}}
    assert tree["list"] == [{"s": {}}, 1]
    assert state == {"a": 1, "b": 2}
    assert result["kept"] is kept
    assert result["state"]._metadata == {"version": 1}


def test_names_with_the_prefixes_of_wrappers() -> None:
    names = {"model.0.weight"}
    assert plain_name("module.model.0.weight", names) == "model.0.weight"
    assert plain_name("module._orig_mod.model.0.weight", names) == "model.0.weight"
    assert plain_name("n_averaged", names) is None
    assert plain_name(3, names) is None


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    tied = Pending(1, 0, (1000,), torch.float32)
    path = tmp_path / "tied.ckpt"
    asked: list[Pending] = []

    def contents(leaf: Pending) -> Iterator[torch.Tensor]:
        asked.append(leaf)
        yield from pieces(torch.full(leaf.shape, 3.0))

    file.write(str(path), {"a": tied, "b": tied, "c": torch.arange(3)}, contents)
    stored = torch.load(path)
    assert asked == [tied]
    assert stored["a"].data_ptr() == stored["b"].data_ptr()
    assert torch.equal(stored["a"], torch.full((1000,), 3.0))
    assert torch.equal(stored["c"], torch.arange(3))
    assert path.stat().st_size < 8000


class Hidden:
    """Keeps a tensor that only pickling finds."""

    def __init__(self) -> None:
        self.tensor = torch.arange(7)


@pytest.mark.parametrize("checksums", [True, False])
def test_the_file_is_that_of_torch(checksums: bool, tmp_path: Path) -> None:
    """Views of one memory, types, empty, sparse and hidden tensors; what is not here comes in its own order."""
    base = torch.randn(40)
    here: dict[str, Any] = {"base": base, "view": base[3:9], "turned": torch.randn(3, 5).t(), "none": torch.empty(0)}
    here |= {"odd": torch.ones(3, dtype=torch.bool), "half": torch.randn(5).bfloat16(), "hidden": Hidden()}
    here |= {
        "sparse": torch.eye(3).to_sparse(),
        "parameter": nn.Parameter(torch.ones(2)),
        "meta": torch.ones(2, device="meta"),
    }
    there = {
        Pending(2, 0, (3,), torch.int64): torch.arange(3),
        Pending(1, 1, (), torch.float64): torch.tensor(4.5).double(),
    }
    there |= {
        Pending(1, 0, (2, 0), torch.float32): torch.empty(2, 0),
        Pending(1, 2, (9,), torch.float32): torch.randn(9),
    }
    asked: list[Pending] = []

    def contents(leaf: Pending) -> Iterator[torch.Tensor]:
        asked.append(leaf)
        return pieces(there[leaf])

    before = get_crc32_options()
    set_crc32_options(checksums)
    try:
        file.write(str(tmp_path / "ours"), {"there": dict(enumerate(there)), "here": here}, contents)
        torch.save({"there": dict(enumerate(there.values())), "here": here}, tmp_path / "theirs")
    finally:
        set_crc32_options(before)
    assert asked == sorted(there, key=lambda leaf: (leaf.rank, leaf.number))
    ours, theirs = (torch.load(tmp_path / name, weights_only=False) for name in ("ours", "theirs"))
    assert torch.equal(ours["here"].pop("hidden").tensor, theirs["here"].pop("hidden").tensor)
    assert ours["here"].pop("meta").is_meta
    assert theirs["here"].pop("meta").is_meta
    assert_same(ours, theirs)
    assert ours["here"]["view"].data_ptr() == ours["here"]["base"].data_ptr() + 12
    with zipfile.ZipFile(tmp_path / "ours") as one, zipfile.ZipFile(tmp_path / "theirs") as other:
        assert [info.file_size for info in one.infolist()] == [info.file_size for info in other.infolist()]
        assert one.testzip() is None or not checksums


def test_tensors_are_never_in_memory_together(tmp_path: Path) -> None:
    """Four tensors of 64 MiB come piece by piece; nothing of the file stays in the memory of the process."""
    tree = {index: Pending(1, index, (1 << 24,), torch.float32) for index in range(4)}
    piece = torch.empty(16 << 18)

    def contents(leaf: Pending) -> Iterator[torch.Tensor]:
        for _ in range(4):
            yield from pieces(piece.fill_(float(leaf.number)))

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    file.write(str(tmp_path / "large.ckpt"), tree, contents)
    assert status("VmHWM") - before < 32 << 20
    assert torch.load(tmp_path / "large.ckpt", mmap=True)[3][-1] == 3


def status(name: str) -> int:
    """Bytes of this process's memory: ``VmRSS`` now, ``VmHWM`` at most since it was last forgotten."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def test_no_file_appears_when_writing_fails(tmp_path: Path) -> None:
    def fail(leaf: Any) -> Any:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        file.write(str(tmp_path / "x.ckpt"), {"a": Pending(1, 0, (3,), torch.float32)}, fail)
    with pytest.raises(CheckpointError, match="room for 12 bytes, and 0 came"):
        file.write(str(tmp_path / "x.ckpt"), {"a": Pending(1, 0, (3,), torch.float32)}, lambda _: ())
    assert not list(tmp_path.iterdir())
