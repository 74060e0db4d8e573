"""Pipeline, data and tensor parallelism in one run: a small Llama of Hugging Face on Python's own source.

python examples/three_dimensions.py                              2 stages x 2 tensor ranks
python examples/three_dimensions.py --replicas 2 --tensor 1      2 stages x 2 replicas, which divide parameters (FSDP2)
python examples/three_dimensions.py --stages 1 --tensor 1        one device, by Lightning alone
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from small_gpt2 import BLOCK, texts
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_pipe


class SmallLlama(L.LightningModule):
    """Four blocks over bytes. Transformers says how tensor ranks divide a Llama; nothing here does."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 256}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=BLOCK))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch or a micro-batch."""
        (tokens,) = batch
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """Print the mean loss."""
        self.print(f"epoch {self.current_epoch}: loss {self.trainer.callback_metrics['loss']:.4f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Train two epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=2)
    arguments = parser.parse_args()
    devices = arguments.stages * arguments.replicas * arguments.tensor
    strategy = lightning_pipe.PipeStrategy(
        pipeline_parallel_size=arguments.stages,
        data_parallel_size=arguments.replicas,
        tensor_parallel_size=arguments.tensor,
        shard_optimizer="parameters" if arguments.replicas > 1 else False,
    )
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy if devices > 1 else "auto",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(SmallLlama(), DataLoader(texts(), batch_size=16))


if __name__ == "__main__":
    main()
