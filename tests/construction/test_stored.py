"""Files that a constructor opens: of their tensors only what somebody needs is read."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import safetensors.torch
import torch
import transformers as hf
from safetensors import safe_open
from torch import Tensor, nn

from lightning_pipe.construction import deferred_init, is_deferred, materialize, stored
from tests.construction.test_deferred import assert_same
from tests.support.built import deferred_tensors, divided

WIDE = 100


class Lit(L.LightningModule):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(layers)))
        self.norm = nn.BatchNorm1d(WIDE)


@pytest.fixture
def module() -> Lit:
    torch.manual_seed(1)
    return Lit()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that are read out of safetensors."""
    names: list[str] = []
    read = stored._read

    def noted(again: Any, name: str) -> Tensor:
        names.append(name)
        return read(again, name)

    monkeypatch.setattr(stored, "_read", noted)
    return names


def written(state: Any, folder: Path) -> Path:
    torch.save(state, folder / "state.pt")
    safetensors.torch.save_file(dict(state["state_dict"]), folder / "state.safetensors")
    return folder


def from_path(folder: Path) -> Any:
    return torch.load(folder / "state.pt")["state_dict"]


def from_open_file(folder: Path) -> Any:
    with open(folder / "state.pt", "rb") as file:
        return torch.load(file, map_location=lambda storage, _: storage)["state_dict"]


def in_slices(folder: Path) -> Any:
    with safe_open(folder / "state.safetensors", "pt") as file:
        return {name: file.get_slice(name)[...] for name in file.keys()}  # noqa: SIM118


WAYS: dict[str, Callable[[Path], Any]] = {
    "torch.load": from_path,
    "torch.load of an open file": from_open_file,
    "safetensors.torch.load_file": lambda folder: safetensors.torch.load_file(folder / "state.safetensors"),
    "slices": in_slices,
}


@pytest.mark.parametrize("way", WAYS)
def test_files_are_read_when_somebody_needs_them(way: str, module: Lit, tmp_path: Path) -> None:
    written({"state_dict": module.state_dict()}, tmp_path)
    with deferred_init():
        state = WAYS[way](tmp_path)
        assert {name for name, value in state.items() if is_deferred(value)} == {
            f"layers.{number}.weight" for number in range(4)
        }
        made = Lit()
        made.load_state_dict(state)
    assert all(is_deferred(layer.weight) for layer in made.layers)
    materialize(made)
    assert_same(made, module)
    assert not any(map(is_deferred, WAYS[way](tmp_path).values()))


def test_what_shares_memory_in_a_file_is_one(tmp_path: Path) -> None:
    one = torch.rand(WIDE, WIDE)
    torch.save({"one": one, "again": one, "turned": one.t(), "kept": nn.Parameter(one)}, tmp_path / "x.pt")
    with deferred_init():
        loaded = torch.load(tmp_path / "x.pt")
        loaded["turned"].mul_(2)
    for name, expected in {"one": one, "again": one, "turned": one.t(), "kept": one}.items():
        assert is_deferred(loaded[name])
        assert torch.equal(loaded[name].detach().clone(), expected * 2), name
    assert isinstance(loaded["kept"], nn.Parameter)


def test_a_copy_lets_the_pages_of_the_file_go_and_keeps_what_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "_PIECE", 1 << 20)
    values = torch.rand(3, 1 << 20)
    torch.save({"kept": values, "changed": values + 1}, tmp_path / "x.pt")
    mapped = torch.load(tmp_path / "x.pt", mmap=True)
    mapped["changed"][1, :5] = 7.0
    # whole, a part of it, nothing, changed, and not contiguous
    parts = [mapped["kept"], mapped["kept"][1:2, 3:], mapped["kept"][:0], mapped["changed"], mapped["changed"].t()]
    expected = [part.clone() for part in parts]
    mapped_before = mapped_bytes(tmp_path / "x.pt")
    for part, value in zip(parts, expected, strict=True):
        assert torch.equal(stored.read_out(part), value)
    assert all(map(torch.equal, parts, expected))  # the file, and the change in memory
    del parts, part
    stored.read_out(mapped["kept"])
    assert mapped_bytes(tmp_path / "x.pt") < mapped_before - 0.9 * values.nbytes


def mapped_bytes(path: Path) -> int:
    """The bytes of a mapped file that count as this process's."""
    found, size = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and not line.split()[0].endswith(":"):
            found = line.endswith(str(path))
        elif found and line.startswith("Rss:"):
            size += int(line.split()[1]) * 1024
    return size


def test_what_cannot_be_mapped_is_read_at_once(tmp_path: Path) -> None:
    values = {"x": torch.rand(WIDE, WIDE)}
    torch.save(values, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    memory = io.BytesIO()
    torch.save(values, memory)
    memory.seek(0)
    with deferred_init():
        for source in (tmp_path / "old.pt", memory):
            assert torch.equal(torch.load(source)["x"], values["x"])


def test_overwritten_values_are_never_made(module: Lit, tmp_path: Path) -> None:
    """Neither those that the constructor drew, nor those of a file that another one follows."""
    torch.save(module.state_dict(), tmp_path / "x.pt")
    with deferred_init():
        made = Lit()
        made.load_state_dict({name: value * 3 for name, value in torch.load(tmp_path / "x.pt").items()})
        made.load_state_dict(torch.load(tmp_path / "x.pt"))
    names = [operation.function.__name__ for tensor in deferred_tensors(made) for operation in recording_of(tensor)]
    assert not any(name.startswith(("uniform_", "mul")) for name in names)
    materialize(made)
    assert_same(made, module)


def recording_of(tensor: Tensor) -> Any:
    from lightning_pipe.construction.deferred import view_of
    from lightning_pipe.construction.tape import _needed

    return _needed([view_of(tensor).cell])


def test_load_from_checkpoint(module: Lit, tmp_path: Path) -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, barebones=True)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with deferred_init():
        made = Lit.load_from_checkpoint(tmp_path / "x.ckpt")
    assert all(is_deferred(layer.weight) for layer in made.layers)
    divided(made, 0, 2, "layers")
    assert torch.equal(made.layers[0].weight, module.layers[0].weight)


def test_from_pretrained_reads_the_tensors_of_its_own_layers_alone(reads: list[str], tmp_path: Path) -> None:
    config = hf.MixtralConfig(
        vocab_size=300,
        hidden_size=96,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    hf.MixtralForCausalLM(config).save_pretrained(tmp_path, max_shard_size="300KB")
    with deferred_init():
        model = hf.MixtralForCausalLM.from_pretrained(tmp_path)
    assert not reads
    divided(model, 1, 4)
    layers = {name.split(".")[2] for name in reads if ".layers." in name}
    assert layers == {"1"}
    assert sum(".experts." in name for name in reads) == 12  # four of each of three, joined to two tensors
    assert sum(name == "model.embed_tokens.weight" for name in reads) == 1
    assert len(reads) == len(set(reads))


def test_what_is_wrong_with_files_is_told_in_their_loader_s_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    logger = hf.utils.logging.get_logger("transformers.modeling_utils")
    monkeypatch.setattr(logger, "warning", lambda text, *args, **kwargs: said.append(text))
    config = hf.GPT2Config(n_layer=2, n_embd=96, n_head=4, vocab_size=300, n_positions=64)
    state = hf.GPT2LMHeadModel(config).state_dict()
    state = {name.replace("h.1.mlp", "h.1.renamed"): value for name, value in state.items() if "lm_head" not in name}
    config.save_pretrained(tmp_path)
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    plain = hf.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)[1]
    expected, said[:] = list(said), []
    with deferred_init():
        found = hf.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)[1]
    assert found == plain
    assert found["missing_keys"]
    assert said == expected != []
