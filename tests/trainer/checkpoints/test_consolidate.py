"""Folders of shards become ordinary checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from lightning_pipe.cli import main
from lightning_pipe.trainer.checkpoints import folder
from tests.support import oracle
from tests.support.checkpoint_runs import run
from tests.trainer.checkpoints.test_divided import assert_same, status


def test_a_folder_of_all_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(None, save=tmp_path / "plain")
    run(1, save=tmp_path / "parts", stages=2, save_distributed_checkpoint=True)
    source = tmp_path / "parts" / "last.ckpt"
    assert source.is_dir()
    main(["consolidate", str(source)])
    target = tmp_path / "parts" / "last.whole.ckpt"
    assert f"\nwrote {target}: 41 tensors, " in capsys.readouterr().out
    ours, theirs = (torch.load(path, weights_only=True) for path in (target, tmp_path / "plain" / "last.ckpt"))
    assert list(ours) == list(theirs)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters"):
        assert_same(ours[part], theirs[part])
    resumed = run(None, resume=tmp_path / "plain" / "epoch=0.ckpt")
    main(["consolidate", str(tmp_path / "parts" / "epoch=0.ckpt"), "--file", str(tmp_path / "first.ckpt")])
    oracle.assert_equal(run(None, resume=tmp_path / "first.ckpt"), resumed)


def test_tensors_are_never_in_memory_together(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {f"state_dict.{i}": torch.full((1 << 24,), float(i)) for i in range(4)}
    save_tensors(tensors, checkpoint_id=tmp_path / "parts", no_dist=True)
    rest: dict[str, Any] = {"checkpoint": {"state_dict": {}}, "values": [], "parameter_names": []}
    rest["tensors"] = [(["state_dict", str(i)], f"state_dict.{i}") for i in range(4)]
    rest["like"] = {key: torch.empty(1 << 24, device="meta") for key in tensors}
    torch.save(rest, tmp_path / "parts" / folder.REST)
    tensors.clear()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    main(["consolidate", str(tmp_path / "parts")])
    assert status("VmHWM") - before < 3 * (64 << 20)
    assert torch.load(tmp_path / "parts.ckpt", mmap=True)["state_dict"]["3"][-1] == 3


def test_another_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source in (tmp_path, tmp_path / "none"):
        with pytest.raises(SystemExit):
            main(["consolidate", str(source)])
        assert f"{source} is no checkpoint in a folder" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.ckpt"))
