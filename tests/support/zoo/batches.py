"""The batches of the zoo, the same ones each time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.support.zoo.base import BATCH, WIDTH


def regression_batches(number: int, sizes: Sequence[int] = (BATCH,)) -> list[dict[str, Tensor]]:
    batches = []
    for index in range(number):
        generator = torch.Generator().manual_seed(1000 + index)
        x = torch.randn(sizes[index % len(sizes)], WIDTH, dtype=torch.float64, generator=generator)
        batches.append({"x": x, "y": torch.sin(3 * x).sum(1, keepdim=True)})
    return batches


def pair_batches(number: int) -> list[tuple[Tensor, Tensor]]:
    return [(batch["x"], batch["y"]) for batch in regression_batches(number)]


def odd_batches(number: int) -> list[dict[str, Tensor]]:
    """Every third batch is short, as the last one of an epoch is."""
    return regression_batches(number, sizes=(BATCH, BATCH, 5))


def token_batches(number: int, lengths: Sequence[int] = (10,), vocabulary: int = 40) -> list[dict[str, Tensor]]:
    batches = []
    for index in range(number):
        generator = torch.Generator().manual_seed(2000 + index)
        shape = (BATCH, lengths[index % len(lengths)])
        batches.append({"ids": torch.randint(2, vocabulary, shape, generator=generator)})
    return batches


def causal_batches(number: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": batch["ids"], "labels": batch["ids"]} for batch in token_batches(number)]


def bert_batches(number: int) -> list[dict[str, Tensor]]:
    batches = []
    for index, batch in enumerate(token_batches(number)):
        ids = batch["ids"]
        mask = torch.ones_like(ids)
        mask[::2, -(1 + index % 3) :] = 0
        following = torch.arange(len(ids)) % 2
        batches.append(
            {"input_ids": ids, "attention_mask": mask, "labels": ids.flip(1), "next_sentence_label": following}
        )
    return batches


def t5_batches(number: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": batch["ids"], "labels": batch["ids"][:, :7].contiguous()} for batch in token_batches(number)]


def token_batches_of_20(number: int) -> list[dict[str, Tensor]]:
    return token_batches(number, vocabulary=20)


def sequence_batches(number: int) -> list[dict[str, Tensor]]:
    return token_batches(number, lengths=(6, 9, 4), vocabulary=20)
