"""From text to blocks of tokens: a byte-level BPE trained on the text, or a ready tokeniser, with a cache on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from recipes.data import vocabulary
from recipes.data.sources import Corpus
from recipes.data.store import kept
from recipes.data.vocabulary import Encode
from recipes.errors import RecipeError

SPECIAL = {"eos": "<|endoftext|>"}
ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class Tokenised:
    """Blocks of tokens on disk.

    Args:
        title: what the text is.
        folder: holds ``train.npy`` and ``validation.npy``, integers of shape [blocks, block length].
        vocabulary: number of different tokens.
        train_tokens: tokens in the training split.
        validation_tokens: tokens in the validation split.
    """

    title: str
    folder: str
    vocabulary: int
    train_tokens: int
    validation_tokens: int

    def blocks(self, split: str) -> NDArray[np.integer]:
        """Opens one split without reading it into memory."""
        return np.load(Path(self.folder) / f"{split}.npy", mmap_mode="r")  # type: ignore[no-any-return]


def cut_into_blocks(texts: Dataset, encode: Encode, separator: int | None, length: int) -> NDArray[np.int32]:
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


def tokenise(corpus: Corpus, size: int, tokenizer: str | None, length: int, cache: Path) -> Tokenised:
    """Tokenises a corpus, or finds the result of an earlier run in the cache.

    Args:
        corpus: the text.
        size: number of tokens of the BPE to train.
        tokenizer: a ready tokeniser instead, by its name on the hub or its folder.
        length: tokens in a block.
        cache: folder for the results.
    """
    key = [corpus.fingerprint, size, tokenizer, length]
    return opened(kept(cache, key, corpus.title, partial(_write, corpus, size, tokenizer, length)))


def opened(folder: Path) -> Tokenised:
    """What `tokenise` has left in a folder."""
    return Tokenised(**json.loads((folder / "about.json").read_text()) | {"folder": str(folder)})


def _write(corpus: Corpus, size: int, tokenizer: str | None, length: int, folder: Path) -> None:
    rows = (row for batch in corpus.splits["train"].iter(ROWS_AT_ONCE) for row in batch["text"])
    words = vocabulary.make(rows, size, tokenizer, SPECIAL, folder)
    separator = words.special["eos"] if corpus.documents else None
    about: dict[str, str | int] = {"title": corpus.title, "vocabulary": words.size}
    for split in ("train", "validation"):
        blocks = cut_into_blocks(corpus.splits[split], words.encode, separator, length)
        np.save(folder / f"{split}.npy", blocks.astype(np.uint16) if words.size <= 2**16 else blocks)
        about[f"{split}_tokens"] = blocks.size
    (folder / "about.json").write_text(json.dumps(about, indent=2))
