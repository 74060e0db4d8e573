"""Hugging Face models and adapters of PEFT on a frozen base train as on one device, and are written as there.

While a module is divided, writing it names the remedy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_pipe import PipeStrategy
from lightning_pipe.errors import ConfigurationError
from tests.support.pairs import asked
from tests.support.processes import run_trainers
from tests.support.trainer_runs import QUIET, quiet

peft = pytest.importorskip("peft", reason="`make` sets up an environment with peft")


def base() -> nn.Module:
    off = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=48, n_head=2, n_positions=8, vocab_size=50, **off))


def lora(**options: Any) -> nn.Module:
    # adapters that begin with zeros would show nothing in the first step
    options = {"target_modules": ["c_attn"], "init_lora_weights": False, "fan_in_fan_out": True, **options}
    return peft.get_peft_model(base(), peft.LoraConfig(r=2, **options))


def llama() -> nn.Module:
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **size))
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))


def frozen_beginning() -> nn.Module:
    model = base()
    for part in (model.transformer.wpe, *model.transformer.h[:2]):
        part.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lora": lora,
    "every linear layer": llama,
    "biases too": lambda: lora(bias="all"),
    "a norm too": lambda: lora(modules_to_save=["ln_f"]),
    "dora": lambda: lora(use_dora=True),
    "ia3": lambda: peft.get_peft_model(base(), peft.IA3Config(task_type="CAUSAL_LM")),
    "prompts": lambda: peft.get_peft_model(
        base(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    ),
    "no adapter, frozen beginning": frozen_beginning,
}


SLOW = {"every linear layer", "biases too", "a norm too", "dora", "ia3"}
"""Further adapters of a kind of which one is fast."""
KINDS = [pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW else kind for kind in MODELS]


class Lit(L.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = MODELS[kind]().double()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        # Transformers would compute the loss in single precision; prompts come before the tokens
        logits = self.model(input_ids=batch).logits[:, -batch.shape[1] : -1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item())
        if isinstance(self.trainer.strategy, PipeStrategy):
            with pytest.raises(ConfigurationError, match=r"trainer\.strategy\.whole_module\(\)"):
                self.model.save_pretrained("nowhere")  # type: ignore[operator]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.01)


class Ended(NamedTuple):
    losses: list[float]
    weights: dict[str, Tensor]
    changed: set[str]
    files: dict[str, Tensor]


def train(process: int, devices: int, folder: Path, kinds: list[str]) -> dict[str, Ended]:
    quiet()
    return {kind: trained(process, devices, folder / kind, kind) for kind in kinds}


def trained(process: int, devices: int, folder: Path, kind: str) -> Ended:
    L.seed_everything(3, verbose=False)
    strategy: Any = PipeStrategy(micro_batches=2, gather_limit=0, compare_losses=False) if devices > 1 else "auto"
    trainer = L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_steps=2, **QUIET)
    if kind == "lora" and devices > 1:
        with trainer.init_module():
            module = Lit(kind)
    else:
        module = Lit(kind)
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items() if kind != "lora"}
    rows = torch.randint(50, (12, 6), generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(rows, batch_size=4))
    if devices > 1:
        for each in (module, copy.deepcopy(module)):
            with pytest.raises(ConfigurationError, match="divided over the ranks") as raised:
                each.model.save_pretrained(folder / "divided")
            assert "trainer.strategy.whole_module()" in str(raised.value)
        assert not (folder / "divided").exists()
        module = trainer.strategy.whole_module()  # type: ignore[attr-defined]
    if process == 0:
        module.model.save_pretrained(folder)  # type: ignore[operator]
    weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    changed = {name for name in before if not torch.equal(before[name], weights[name])}
    files = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return Ended(module.losses, weights, changed, files)


@pytest.fixture(scope="module")
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Ended], dict[str, Ended]]:
    """All kinds that were asked for, on one device and in one world of two."""
    kinds = asked(request, "kind")
    one = train(0, 1, tmp_path_factory.mktemp("one"), kinds)
    two = run_trainers(train, 2, timeout=90, devices=2, folder=tmp_path_factory.mktemp("two"), kinds=kinds)
    return one, two[0]


@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_on_one_device(kind: str, ended: tuple[dict[str, Ended], dict[str, Ended]]) -> None:
    expected, found = (each[kind] for each in ended)
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-9, atol=1e-10)
    assert found.losses[-1] != found.losses[0]
    assert kind == "lora" or found.changed == expected.changed


@pytest.mark.parametrize("kind", KINDS)
def test_writes_adapters_alone(kind: str, ended: tuple[dict[str, Ended], dict[str, Ended]]) -> None:
    expected, found = (each[kind].files for each in ended)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    if kind in ("lora", "every linear layer"):
        assert found
        assert all(".lora_A." in name or ".lora_B." in name for name in found)
