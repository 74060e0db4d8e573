"""Blocks of text for language models, as a LightningDataModule."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from datasets import Dataset as Rows
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from recipes.data import choice, files, sources, vocabulary
from recipes.data.loading import Draw, draw_of
from recipes.data.prepared import Prepared
from recipes.data.sources import Corpus
from recipes.data.store import kept
from recipes.data.vocabulary import Encode
from recipes.errors import RecipeError

log = logging.getLogger(__name__)

NAME = "Salesforce/wikitext"
STAND_IN = ("standard_library", "Python's standard library")
SPECIAL = {"eos": "<|endoftext|>"}
ROWS_AT_ONCE = 1000


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


@dataclass(kw_only=True, eq=False, repr=False)
class TextBlocks(Prepared):
    """WikiText, local files in its format, or Python's standard library, in blocks of tokens.

    Args:
        source: "auto", "hub", "files" or "standard_library".
        files: folder with ``train*`` and ``valid*`` files, parquet or text.
        configuration: of the data set on the hub.
        block_length: tokens in a block.
    """

    source: Literal["auto", "hub", "files", "standard_library"] = "auto"
    name: str = NAME
    configuration: str = "wikitext-2-raw-v1"
    vocabulary: int = 2048
    block_length: int = 128
    batch_size: int = 16
    special = SPECIAL

    @override
    def prepare(self) -> Path:
        source = choice.choose(self.source, self.files, self.name, NAME, STAND_IN)
        readers: dict[str, Callable[[], Corpus]] = {
            "hub": lambda: sources.hub(self.name, self.configuration),
            "files": lambda: sources.local_files(files.chosen(self.files, self.name)),
            "standard_library": sources.standard_library,
        }
        text = readers[source]()
        folder = kept(Path(self.cache, "text"), text, tokenise, self.vocabulary, self.tokenizer, self.block_length)
        sizes = [_blocks(folder, split).size / 1e6 for split in ("train", "validation")]
        log.info("Text: %s; %.2f M tokens for training, %.2f M for validation.", text.title, *sizes)
        return folder

    @override
    def split(self, name: str) -> Blocks:
        return Blocks(_blocks(self.folder, name))


def tokenise(text: Corpus, size: int, tokenizer: str | None, length: int, folder: Path) -> None:
    """Tokenises a text and cuts it into blocks.

    Args:
        text: the text.
        size: number of tokens of a new tokeniser.
        tokenizer: a ready one instead.
        length: tokens in a block.
        folder: gets the tokeniser and, for both splits, integers of shape [blocks, length].
    """
    rows = (row for batch in text.splits["train"].iter(ROWS_AT_ONCE) for row in batch["text"])
    words = vocabulary.make(rows, size, tokenizer, SPECIAL, folder)
    separator = words.special["eos"] if text.documents else None
    for split, texts in text.splits.items():
        blocks = cut_into_blocks(texts, words.encode, separator, length)
        np.save(folder / f"{split}.npy", blocks.astype(np.uint16) if words.size <= 2**16 else blocks)


def _blocks(folder: Path, split: str) -> NDArray[np.integer]:
    """Opens the blocks of a split without reading them into memory."""
    return np.load(folder / f"{split}.npy", mmap_mode="r")  # type: ignore[no-any-return]


def cut_into_blocks(texts: Rows, encode: Encode, separator: int | None, length: int) -> NDArray[np.int32]:
    """Concatenates all rows and cuts them into blocks; what is left over at the end is dropped.

    Args:
        texts: one column, "text".
        encode: rows to token numbers.
        separator: put after every row, unless None.
        length: tokens in a block.

    Returns:
        shape [blocks, length].
    """
    tail = [] if separator is None else [separator]
    pieces = [
        np.fromiter((token for ids in encode(batch["text"]) for token in [*ids, *tail]), dtype=np.int32)
        for batch in texts.iter(ROWS_AT_ONCE)
    ]
    stream = np.concatenate(pieces)
    whole = len(stream) // length
    if whole == 0:
        raise RecipeError(
            f"A split has {len(stream)} tokens, less than one block of {length}.",
            hint=f"Use more text, or data.block_length={max(1, len(stream) // 2)} or less.",
        )
    return stream[: whole * length].reshape(whole, length)
