"""Checkpoints appear when they are complete; what killed runs leave goes with the next one of its name."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import TorchCheckpointIO

from lightning_pipe.errors import CheckpointError
from lightning_pipe.trainer.checkpoints import file
from lightning_pipe.trainer.checkpoints.file import atomic_write, complete_path


def make(path: Path, *, folder: bool, text: str) -> None:
    with atomic_write(str(path), folder=folder) as place:
        target = Path(place) / "part" if folder else Path(place)
        target.write_text(text)


def content(path: Path) -> str:
    return (path / "part" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("before", [None, False, True])
@pytest.mark.parametrize("folder", [False, True])
def test_what_is_complete_replaces_what_was_there(before: bool | None, folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    if before is not None:
        make(path, folder=before, text="old")
    make(path, folder=folder, text="new")
    assert content(path) == "new"
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("folder", [False, True])
def test_an_error_leaves_what_was_there(folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    make(path, folder=folder, text="old")
    with pytest.raises(KeyError) as raised, atomic_write(str(path), folder=folder):
        raise KeyError(os.listdir(tmp_path))
    # Lightning takes all names with "last" in them for the last checkpoint
    assert ["last" in name for name in raised.value.args[0]].count(True) == 1
    assert content(path) == "old"
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_link_is_replaced_and_not_what_it_links_to(tmp_path: Path) -> None:
    make(tmp_path / "best.ckpt", folder=True, text="best")
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    make(tmp_path / "last.ckpt", folder=True, text="new")
    assert content(tmp_path / "best.ckpt") == "best"
    assert content(tmp_path / "last.ckpt") == "new"
    assert not (tmp_path / "last.ckpt").is_symlink()


@pytest.mark.parametrize("folder", [False, True])
def test_what_a_killed_run_has_left_goes_with_the_next_one(folder: bool, tmp_path: Path) -> None:
    make(tmp_path / "killed.ckpt", folder=folder, text="old")
    child = os.fork()
    if child == 0:
        with atomic_write(str(tmp_path / "killed.ckpt"), folder=folder) as place:
            Path(place, "half").touch() if folder else Path(place).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(os.listdir(tmp_path)) == 2
    assert content(tmp_path / "killed.ckpt") == "old"
    make(tmp_path / "killed.ckpt", folder=folder, text="new")
    assert content(tmp_path / "killed.ckpt") == "new"
    assert os.listdir(tmp_path) == ["killed.ckpt"]


@pytest.mark.parametrize("folder", [False, True])
def test_two_runs_that_write_one_checkpoint_at_the_same_time(folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    with pytest.raises(CheckpointError, match="could not be written") as raised:  # noqa: SIM117
        with atomic_write(str(path), folder=folder):
            make(path, folder=folder, text="complete")
    assert "default_root_dir" in str(raised.value)
    assert content(path) == "complete"
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_run_that_is_killed_between_two_names_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    make(path, folder=True, text="old")
    rename = os.rename

    def killed(one: str, other: str) -> None:
        if other == str(path):
            raise KeyboardInterrupt
        rename(one, other)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        make(path, folder=True, text="new")
    assert not path.exists()
    assert content(Path(complete_path(str(path)))) == "old"


@pytest.fixture
def small_disk() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_named_and_the_last_checkpoint_stays(tmp_path: Path, small_disk: None) -> None:
    path = tmp_path / "last.ckpt"

    def write(content: Any) -> None:
        with atomic_write(str(path)) as place:
            TorchCheckpointIO().save_checkpoint({"a": content}, place)

    write(1)
    with pytest.raises(CheckpointError, match=r"last\.ckpt could not be written: File too large"):
        write(torch.zeros(10_000))
    assert torch.load(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/last\.ckpt could not be written: (Not a directory|File exists)"):
        make(tmp_path / "file" / "last.ckpt", folder=False, text="")


POINTER = b"version https://git-lfs.github.com/spec/v1\nsize 12345\n"


@pytest.mark.parametrize("weights_only", [False, True, None])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 something else" * 50, b"half", b"damaged", POINTER])
def test_what_is_no_checkpoint_is_named(content: bytes, weights_only: bool | None, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    if content in (b"half", b"damaged"):
        torch.save({"a": torch.zeros(1000)}, path)
        whole = path.read_bytes()
        content = whole[:2000] if content == b"half" else whole.replace(b"\x80\x02}", b"\x00\x00\x00")
        assert content != whole
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"last\.ckpt \({len(content):,} bytes\) cannot be read") as caught:
        file.read(str(path), weights_only=weights_only)
    assert "file an issue" not in str(caught.value)


def test_an_old_file_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert file.read(str(tmp_path / "old.ckpt"), weights_only=True)["a"].sum() == 3
