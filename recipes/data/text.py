"""Blocks of text for language models, as a LightningDataModule."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from recipes.data import sources, vocabulary
from recipes.data.choice import choose
from recipes.data.loading import Draw, draw_of
from recipes.data.prepared import Prepared
from recipes.data.tokens import SPECIAL, Tokenised, opened, tokenise
from recipes.data.vocabulary import Vocabulary

log = logging.getLogger(__name__)

NAME = "Salesforce/wikitext"
STAND_IN = ("standard_library", "Python's standard library")


class Blocks(Dataset[dict[str, Tensor]]):
    """Blocks of tokens as a causal language model wants them.

    Args:
        blocks: integers of shape [blocks, length].

    Example:
        >>> Blocks(np.array([[5, 6, 7]]))[0]
        {'input_ids': tensor([5, 6, 7]), 'labels': tensor([5, 6, 7])}
    """

    def __init__(self, blocks: NDArray[np.integer]) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, key: Draw | int) -> dict[str, Tensor]:
        block = torch.from_numpy(self.blocks[draw_of(key).sample].astype(np.int64))
        return {"input_ids": block, "labels": block}  # Hugging Face models shift the labels themselves


class TextBlocks(Prepared):
    """WikiText, local files in its format, or Python's standard library, in blocks of tokens.

    Args:
        source: "auto", "hub", "files" or "standard_library"; "auto" takes ``files`` where they are given, else the hub
            where it answers, else the standard library.
        files: folder with ``train*`` and ``valid*`` files, parquet or text.
        name: data set on the hub.
        configuration: its configuration there.
        vocabulary: size of the byte-level BPE trained on the training split.
        tokenizer: a ready tokeniser instead, by its name on the hub or its folder.
        block_length: tokens in a block.
        batch_size: blocks in a batch of one pipeline.
        cache: folder for tokenised text.
        seed: of the order.
        workers: processes that load batches.
    """

    def __init__(
        self,
        *,
        source: str = "auto",
        files: str | None = None,
        name: str = NAME,
        configuration: str = "wikitext-2-raw-v1",
        vocabulary: int = 2048,
        tokenizer: str | None = None,
        block_length: int = 128,
        batch_size: int = 16,
        cache: str = "data",
        seed: int = 1,
        workers: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.source, self.files, self.hub = source, files, (name, configuration)
        self.vocabulary, self.tokenizer, self.block_length = vocabulary, tokenizer, block_length
        self.batch_size, self.seed, self.workers = batch_size, seed, workers
        self.cache = Path(cache).expanduser() / "text"

    @override
    def prepare(self) -> Path:
        source = choose(self.source, self.files, self.hub[0], NAME, STAND_IN)
        corpus = sources.read(source, self.files, *self.hub)
        tokenised = tokenise(corpus, self.vocabulary, self.tokenizer, self.block_length, self.cache)
        log.info(
            "Text: %s; %.2f M tokens for training, %.2f M for validation.",
            tokenised.title,
            tokenised.train_tokens / 1e6,
            tokenised.validation_tokens / 1e6,
        )
        return Path(tokenised.folder)

    @override
    def check(self) -> None:
        vocabulary.check_size(self.tokenised.vocabulary, self.vocabulary)

    @property
    def words(self) -> Vocabulary:
        """The tokeniser."""
        return vocabulary.load(self.folder, SPECIAL)

    @property
    def tokenised(self) -> Tokenised:
        """The blocks."""
        return opened(self.folder)

    @override
    def split(self, name: str) -> Blocks:
        return Blocks(self.tokenised.blocks(name))
