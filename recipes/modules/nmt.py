"""GPipe's multilingual translator."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.text import SacreBLEUScore
from typing_extensions import override

from recipes.data.vocabulary import Vocabulary
from recipes.models import NMTTransformer
from recipes.modules.trained import Trained

PAD = 0


class Translator(Trained, network=NMTTransformer):
    """T(L, H, A) with label smoothing.

    Batches are those of `recipes.data.translation.collated`: their loss is that per token of the whole batch, however
    the batch is divided.

    Args:
        positions: longest source and target.
        label_smoothing: share of the target that is spread over the vocabulary.
        weight_decay: on matrices only.
        network: arguments of `recipes.models.NMTTransformer`.
    """

    def __init__(
        self,
        *,
        positions: int = 1024,
        label_smoothing: float = 0.1,
        weight_decay: float = 0.0,
        **network: Any,
    ) -> None:
        super().__init__(weight_decay)
        self.save_hyperparameters()
        self.positions, self.label_smoothing = positions, label_smoothing
        self.model = NMTTransformer(**network)
        tokens = torch.zeros(1, positions, dtype=torch.long)
        self.example_input_array = (tokens, tokens, tokens == 0)
        self.test_bleu = SacreBLEUScore()

    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        """Predicts every next token of the target."""
        output: Tensor = self.model(batch["source"], batch["target"], batch["mask"])
        return output

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        each = F.cross_entropy(
            self.logits(batch).transpose(1, 2),
            batch["labels"],
            ignore_index=PAD,
            reduction="none",
            label_smoothing=self.label_smoothing,
        )
        loss = (each.sum(1) / batch["mean_length"]).mean()
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits, labels = self.logits(batch), batch["labels"]
        loss = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=PAD)
        real = labels != PAD
        accuracy = (logits.argmax(-1) == labels)[real].float().mean()
        values = {"val_loss": loss, "val_token_accuracy": accuracy}
        self.log_dict(values, batch_size=int(real.sum()), prog_bar=True, sync_dist=True)

    @override
    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        words: Vocabulary = self.trainer.datamodule.words  # type: ignore[attr-defined]
        begin, end = (words.special[role] for role in ("bos", "eos"))
        longest = min(self.positions, batch["labels"].shape[1] + 10)
        translated = self.translate(batch["source"], batch["mask"], begin, end, longest)
        ours, theirs = (_texts(rows, words) for rows in (translated, batch["labels"]))
        self.test_bleu.update(ours, [[reference] for reference in theirs])
        self.log("test_bleu", self.test_bleu, batch_size=len(translated))

    @torch.no_grad()
    def translate(self, source: Tensor, mask: Tensor, begin: int, end: int, longest: int) -> Tensor:
        """Translates greedily: the likeliest token, one after the other.

        Args:
            source: tokens of shape [batch, length].
            mask: true where the source is not padding.
            begin: the token that targets begin with.
            end: the token that they end with.
            longest: most tokens of a translation.

        Returns:
            tokens of shape [batch, length], without the begin token.
        """
        target = torch.full((len(source), 1), begin, device=source.device)
        done = torch.zeros(len(source), dtype=torch.bool, device=source.device)
        for _ in range(longest):
            token = self.model(source, target, mask)[:, -1].argmax(-1)
            target = torch.cat([target, token[:, None]], dim=1)
            done |= token == end
            if done.all():
                break
        return target[:, 1:]


def _texts(rows: Tensor, words: Vocabulary) -> list[str]:
    """Decodes each row up to its end token."""
    end, listed = words.special["eos"], rows.tolist()
    return [words.decode(row[: row.index(end)] if end in row else row) for row in listed]
