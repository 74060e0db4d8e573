"""Weights by name from files of several kinds, into modules that are whole, without memory, or divided."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import transformers as hf
from torch import Tensor, nn

import lightning_pipe
from lightning_pipe.construction import deferred_init, materialize, stored
from lightning_pipe.errors import CheckpointError
from lightning_pipe.intercept.absent_tensor import AbsentTensor
from tests.support.built import all_tensors, divided
from tests.support.pairs import pairs

CONFIG = hf.GPT2Config(n_layer=4, n_embd=96, n_head=4, vocab_size=300, n_positions=64)


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = hf.GPT2LMHeadModel(CONFIG)


@pytest.fixture(scope="module")
def saved() -> Lit:
    torch.manual_seed(1)
    return Lit()


def sharded(module: Lit, path: Path) -> Path:
    module.model.save_pretrained(path, max_shard_size="200KB")
    return path


def one_file(module: Lit, path: Path) -> Path:
    state = module.model.state_dict()
    del state["lm_head.weight"]
    safetensors.torch.save_file(state, path / "x.safetensors")
    return path / "x.safetensors"


def distributed(module: Lit, path: Path) -> Path:
    dcp.save(module.model.state_dict(), checkpoint_id=path, no_dist=True)
    return path


def of_torch(module: Lit, path: Path) -> Path:
    torch.save({"state_dict": module.model.state_dict(), "epoch": 3}, path / "x.ckpt")
    return path / "x.ckpt"


KINDS: dict[str, Callable[[Lit, Path], Path]] = {
    "sharded": sharded,
    "one file": one_file,
    "distributed": distributed,
    "torch": of_torch,
}


def into_divided(path: Path, rank: int) -> Lit:
    with deferred_init():
        module = Lit()
    divided(module, rank, 2)
    lightning_pipe.load_weights(module.model, path)
    return module


def into_recorded(path: Path, rank: int) -> Lit:
    with deferred_init():
        module = Lit()
        lightning_pipe.load_weights(module.model, path)
    divided(module, rank, 2)
    return module


def into_meta(path: Path, rank: int) -> Lit:
    with torch.device("meta"):
        module = Lit()
        lightning_pipe.load_weights(module.model, path)
    divided(module, rank, 2)
    materialize(module)
    return module


@pytest.mark.parametrize(
    ("kind", "into"), pairs(list(KINDS), [into_divided, into_recorded, into_meta], lambda kind, into: kind % 3 == into)
)
def test_each_rank_reads_its_own(
    kind: str, into: Callable[[Path, int], Lit], saved: Lit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    cell = stored._cell

    def counted(function: Callable[..., Tensor], *args: Any) -> Any:
        def noted(*args: Any) -> Tensor:
            value = function(*args)
            read.append(value.nbytes)
            return value

        return cell(noted, *args)

    monkeypatch.setattr(stored, "_cell", counted)
    path = KINDS[kind](saved, tmp_path)
    expected = all_tensors(saved)
    seen: set[str] = set()
    for rank in range(2):
        read.clear()
        module = into(path, rank)
        found = {name: tensor for name, tensor in all_tensors(module).items() if not isinstance(tensor, AbsentTensor)}
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name
        seen |= set(found)
        large = {id(tensor): tensor.nbytes for tensor in found.values() if tensor.nbytes > 16 * 1024}
        assert sum(large.values()) <= sum(read) < 1.1 * sum(large.values())
    assert seen == set(expected)


def test_names_that_differ(saved: Lit, tmp_path: Path) -> None:
    torch.save({**saved.state_dict(), "other": torch.ones(2)}, tmp_path / "x.pt")
    module = Lit()
    with pytest.raises(CheckpointError, match=r"does not fit GPT2LMHeadModel: missing .*; unexpected model"):
        lightning_pipe.load_weights(module.model, tmp_path / "x.pt")
    assert lightning_pipe.load_weights(module.model, tmp_path / "x.pt", prefix="model.") == ([], [])
    for name, tensor in all_tensors(module).items():
        assert torch.equal(tensor, all_tensors(saved)[name])
    assert lightning_pipe.load_weights(module, tmp_path / "x.pt", strict=False) == ([], ["other"])
    module.model.transformer.ln_f = nn.LayerNorm(5)
    with pytest.raises(CheckpointError, match=r"'transformer\.ln_f\.weight' is \(5,\) in the module and \(96,\)"):
        lightning_pipe.load_weights(module.model, tmp_path / "x.pt", prefix="model.")
    with pytest.raises(CheckpointError, match="holds no weights"):
        lightning_pipe.load_weights(module, tmp_path / "nothing")
