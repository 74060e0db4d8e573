"""Fine-tune a GPT-2 of Hugging Face in a pipeline of two stages, and export it as one.

    python examples/gpt2.py                         a tiny model, made here: nothing is downloaded
    python examples/gpt2.py --model openai-community/gpt2 --text my_text.txt

The exported folder is an ordinary one: `AutoModelForCausalLM.from_pretrained("gpt2_tuned")` reads it without pipelines.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning as L
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import lightning_pipe  # noqa: F401 - makes "pipe" known to the Trainer

BLOCK = 64


def make_tiny_checkpoint(folder: Path) -> None:
    """A checkpoint in Hugging Face's format whose tokens are bytes, in place of one from the hub."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(letters), n_positions=BLOCK, n_embd=32, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder)


class Blocks(Dataset[dict[str, Tensor]]):
    """A text as blocks of tokens.

    Args:
        tokens: the text's tokens.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.blocks = torch.tensor(tokens[: len(tokens) // BLOCK * BLOCK]).view(-1, BLOCK)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


class FineTuned(L.LightningModule):
    """A causal language model, read from a checkpoint.

    Args:
        name: a model of the hub, or a folder.
        lr: learning rate.
    """

    def __init__(self, name: str, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.model = AutoModelForCausalLM.from_pretrained(name)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of one micro-batch."""
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    """Train and export."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a model of the hub or a folder; by default a tiny one that is made here")
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="a text; by default Python's own")
    parser.add_argument("--output", type=Path, default=Path("gpt2_tuned"))
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-3)
    arguments = parser.parse_args()
    name = arguments.model
    if name is None:
        name = str(arguments.output.with_name(arguments.output.name + "_start"))
        # The other processes run this script as well; only the first one writes.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            make_tiny_checkpoint(Path(name))
    tokenizer = AutoTokenizer.from_pretrained(name)
    data = Blocks(tokenizer(arguments.text.read_text(encoding="utf-8"))["input_ids"])
    module = FineTuned(name, arguments.lr)
    trainer = L.Trainer(
        strategy="pipe",
        devices=arguments.devices,
        max_steps=arguments.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=16, shuffle=True))
    # After fit the module is whole again on every rank.
    if trainer.is_global_zero:
        module.model.save_pretrained(arguments.output)
        tokenizer.save_pretrained(arguments.output)
        print(f"loss {float(trainer.callback_metrics['loss']):.3f}, exported to {arguments.output}")


if __name__ == "__main__":
    main()
