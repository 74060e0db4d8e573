"""GPT-2 as a LightningModule: Hugging Face's model, built from its configuration."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch import Tensor
from torchmetrics import MeanMetric
from transformers import GPT2Config, GPT2LMHeadModel
from typing_extensions import override

from recipes.optim import MakeOptimizer, MakeScheduler, decay_groups


class Perplexity(MeanMetric):
    """The exponential of the mean loss over everything seen: e to the cross-entropy per token."""

    @override
    def compute(self) -> Tensor:
        return super().compute().exp()


class GPT2(L.LightningModule):
    """GPT-2 with tied input and output embeddings.

    Args:
        vocabulary: number of tokens.
        positions: longest block.
        width: hidden size.
        layers: number of Transformer blocks.
        heads: attention heads.
        dropout: probability of every dropout.
        weight_decay: on matrices only.
        optimizer: makes the optimizer from parameter groups; needed for training only.
        scheduler: makes the learning rate schedule from the optimizer and the number of steps; None keeps it constant.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 50257,
        positions: int = 1024,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
        dropout: float = 0.1,
        weight_decay: float = 0.01,
        optimizer: MakeOptimizer | None = None,
        scheduler: MakeScheduler | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer", "scheduler"])
        self.weight_decay = weight_decay
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocabulary,
                n_positions=positions,
                n_embd=width,
                n_layer=layers,
                n_head=heads,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
        self.model.loss_type = "ForCausalLM"  # transformers 5 cannot tell it from GPT-2's class name, and warns
        self.val_perplexity = Perplexity()

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss, samples = self.model(**batch).loss, len(batch["input_ids"])
        self.val_perplexity.update(loss, weight=samples)
        self.log("val_loss", loss, batch_size=samples, prog_bar=True, sync_dist=True)
        self.log("val_perplexity", self.val_perplexity, batch_size=samples)

    @override
    def configure_optimizers(self) -> Any:
        if self.make_optimizer is None:
            raise TypeError("GPT2 was built without an optimizer, so it can be evaluated but not trained.")
        optimizer = self.make_optimizer(decay_groups(self, self.weight_decay))
        if self.make_scheduler is None:
            return optimizer
        schedule = self.make_scheduler(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
