"""Divided Hugging Face models are exported by the ranks together; folders of shards become ordinary checkpoints."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import ConfigurationError
from lightning_pipe.trainer import export
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

SMALL: dict[str, Any] = {"n_layer": 4, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 50}


class Lit(L.LightningModule):
    """A language model with tied embeddings, or without."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(**SMALL, tie_word_embeddings=tied))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    test_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Bert(Lit):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        size = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
        self.model = BertForMaskedLM(BertConfig(**size, num_hidden_layers=4, tie_word_embeddings=tied))  # type: ignore


class During(L.Callback):
    """Exports while the run is under way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.model.save_pretrained(self.folder)


def trained(process: int, devices: int, folder: Path, kind: type[Lit] = Lit, **options: Any) -> dict[str, Any]:
    quiet()
    L.seed_everything(3, verbose=False)
    module = kind(**options)
    layers = "model.bert.encoder.layer" if kind is Bert else "model.transformer.h"
    strategy = PipeStrategy(layers=layers, micro_batches=1, gather_limit=0)
    calls = [During(folder / "during")]
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=1, callbacks=list(calls), **QUIET
    )
    data = DataLoader(torch.arange(32).view(4, 8) % 50, batch_size=4)
    trainer.fit(module, data)
    module.model.save_pretrained(folder / "after")
    module.model.save_pretrained(folder / "after", max_shard_size="3KB", variant="fp16")
    doubled = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in {id(p): p for p in doubled.parameters()}.values():
            parameter.mul_(2)
    doubled.model.save_pretrained(folder / "doubled")
    sees, export.sees = export.sees, lambda path: False  # type: ignore[assignment]
    try:
        module.model.save_pretrained(folder / "streamed")
    finally:
        export.sees = sees
    try:
        module.model.save_pretrained(folder / "hub", push_to_hub=True)
        raise AssertionError
    except ConfigurationError as error:
        message = str(error)
    module = trainer.strategy.whole_module()  # type: ignore[attr-defined]
    assert type(module.model).save_pretrained == module.model.save_pretrained.__func__
    if trainer.is_global_zero:
        module.model.save_pretrained(folder / "whole")
    return {"values": {name: value.clone() for name, value in module.model.state_dict().items()}, "message": message}


def families(process: int, folder: Path, devices: int) -> dict[str, Any]:
    return {
        f"{kind.__name__}-{tied}": trained(process, devices, folder / f"{kind.__name__}-{tied}", kind, tied=tied)
        for kind, tied in ((Lit, True), (Lit, False), (Bert, True))
    }


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_every_rank_writes_its_shard(devices: int, tmp_path: Path) -> None:
    ranks = run_trainers(families, devices, timeout=90, folder=tmp_path, devices=devices)
    for name, found in ranks[0].items():
        kind: type[PreTrainedModel] = BertForMaskedLM if name.startswith("Bert") else GPT2LMHeadModel
        folder = tmp_path / name
        assert "push_to_hub" in found["message"]
        expected = keys(folder / "whole")
        for where in ("during", "after", "doubled", "streamed"):
            assert keys(folder / where) == expected, (name, where)
            factor = 2 if where == "doubled" else 1
            for key, value in kind.from_pretrained(folder / where).state_dict().items():
                assert torch.equal(value, factor * found["values"][key]), (name, where, key)
            files = {path.name for path in (folder / where).iterdir() if ".fp16" not in path.name}
            shards = {f"model-{number:05d}-of-{devices:05d}.safetensors" for number in range(1, devices + 1)}
            others = {path.name for path in (folder / "whole").iterdir()} - {"model.safetensors"}
            assert files == shards | {"model.safetensors.index.json"} | others
        small = kind.from_pretrained(folder / "after", variant="fp16")
        assert all(torch.equal(value, found["values"][key]) for key, value in small.state_dict().items())
        assert len(list((folder / "after").glob("model.fp16-*.safetensors"))) > devices


def keys(folder: Path) -> set[str]:
    """The names of the weights in the files of a folder, each in one of them."""
    shards = [export._shard(path).keys for path in folder.glob("model*.safetensors") if ".fp16" not in path.name]
    names = [name for shard in shards for name in shard]
    assert len(set(names)) == len(names)
    if (index := folder / "model.safetensors.index.json").exists():
        assert set(json.loads(index.read_text())["weight_map"]) == set(names)
    return set(names)


def test_shards_of_an_earlier_export_go(tmp_path: Path) -> None:
    earlier = ["model.safetensors", "model-00001-of-00009.safetensors", "model.fp16-00001-of-00009.safetensors"]
    for name in [*earlier, "tokenizer.json", "part/config.json", "part/1", "part/2"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    shards = [export.Shard("model", (key,), 4, str(tmp_path / "part" / key)) for key in ("1", "2")]
    export._publish(str(tmp_path), str(tmp_path / "part"), shards, {"variant": None, "parameters": 2})
    names = {path.name for path in tmp_path.iterdir()} - {"part"}
    assert names == {
        *(f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)),
        *("model.fp16-00001-of-00009.safetensors", "tokenizer.json", "config.json", "model.safetensors.index.json"),
    }
    assert not any(isinstance(part, export.SavePretrained) for part in vars(nn.Linear(1, 1)).values())
