"""BERT with both of its heads: masked tokens and whether the second segment follows the first."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy
from typing_extensions import override

from recipes.data.segment_pairs import IGNORED
from recipes.models import bert
from recipes.modules.trained import Trained


class BERT(Trained, network=bert):
    """BERT in pre-training.

    The loss of a pair's masked tokens is their mean, that of a batch the mean over pairs: so it is the same however
    a batch is divided.

    Args:
        weight_decay: on matrices only.
        network: arguments of `recipes.models.bert`.
    """

    def __init__(self, *, weight_decay: float = 0.01, **network: Any) -> None:
        super().__init__(weight_decay)
        self.save_hyperparameters()
        self.model = bert(**network)
        positions = self.model.config.max_position_embeddings
        self.example_input_array = {"input_ids": torch.zeros(1, positions, dtype=torch.long)}
        self.val_masked_accuracy = MulticlassAccuracy(
            self.model.config.vocab_size, average="micro", ignore_index=IGNORED
        )
        self.val_next_accuracy = BinaryAccuracy()

    def losses(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Runs the model.

        Returns:
            the losses of the two heads and their logits.
        """
        inputs = {name: batch[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
        output = self.model(**inputs)
        tokens, following = output.prediction_logits, output.seq_relationship_logits
        each = F.cross_entropy(tokens.transpose(1, 2), batch["labels"], ignore_index=IGNORED, reduction="none")
        masked = (each.sum(1) / (batch["labels"] != IGNORED).sum(1)).mean()
        return masked, F.cross_entropy(following, batch["next_sentence_label"]), tokens, following

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        masked, following, _, _ = self.losses(batch)
        self.log("train_loss", masked + following, prog_bar=True)
        return masked + following

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        masked, following, tokens, next_logits = self.losses(batch)
        self.val_masked_accuracy.update(tokens.transpose(1, 2), batch["labels"])
        self.val_next_accuracy.update(next_logits.argmax(1), batch["next_sentence_label"])
        values = {
            "val_loss": masked + following,
            "val_masked_loss": masked,
            "val_next_loss": following,
        }
        self.log_dict(values, batch_size=len(tokens), prog_bar=True, sync_dist=True)
        self.log("val_masked_accuracy", self.val_masked_accuracy, batch_size=len(tokens))
        self.log("val_next_accuracy", self.val_next_accuracy, batch_size=len(tokens))
