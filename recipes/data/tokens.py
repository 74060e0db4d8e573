"""From text to blocks of tokens: a byte-level BPE trained on the text, or a ready tokeniser, with a cache on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes.data.sources import Corpus
from recipes.errors import RecipeError

log = logging.getLogger(__name__)

SEPARATOR = "<|endoftext|>"
ROWS_AT_ONCE = 1000
Encode = Callable[[list[str]], list[list[int]]]


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


def train_bpe(rows: Iterator[str], vocabulary: int) -> Tokenizer:
    """Trains a byte-level BPE, GPT-2's kind of tokeniser: any text can be written with it, and read back exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        rows,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[SEPARATOR],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


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


def tokenise(corpus: Corpus, vocabulary: int, tokenizer: str | None, length: int, cache: Path) -> Tokenised:
    """Tokenises a corpus, or finds the result of an earlier run in the cache.

    Args:
        corpus: the text.
        vocabulary: size of the BPE to train.
        tokenizer: a ready tokeniser instead, by its name on the hub or its folder.
        length: tokens in a block.
        cache: folder for the results.
    """
    key = hashlib.sha256(json.dumps([corpus.fingerprint, vocabulary, tokenizer, length]).encode()).hexdigest()[:16]
    folder = cache / key
    about = folder / "about.json"
    if not about.exists():
        _write(corpus, vocabulary, tokenizer, length, folder)
    return Tokenised(**json.loads(about.read_text()) | {"folder": str(folder)})


def _write(corpus: Corpus, vocabulary: int, tokenizer: str | None, length: int, folder: Path) -> None:
    started = time.perf_counter()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its final place and moved there when complete: a broken-off run leaves no half-written cache.
    building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".building-"))
    encode, separator, size = _encoder(corpus, vocabulary, tokenizer, building)
    tokens = {}
    for split in ("train", "validation"):
        blocks = cut_into_blocks(corpus.splits[split], encode, separator if corpus.documents else None, length)
        np.save(building / f"{split}.npy", blocks.astype(np.uint16) if size <= 2**16 else blocks)
        tokens[split] = blocks.size
    result = Tokenised(corpus.title, str(folder), size, tokens["train"], tokens["validation"])
    (building / "about.json").write_text(json.dumps(asdict(result), indent=2))
    try:
        os.rename(building, folder)
    except OSError:  # another run has just finished the same one
        shutil.rmtree(building)
    log.info("Tokenised %s in %.1f s, kept in %s.", corpus.title, time.perf_counter() - started, folder)


def _encoder(corpus: Corpus, vocabulary: int, name: str | None, folder: Path) -> tuple[Encode, int | None, int]:
    """Returns rows -> token numbers, the separator's number if there is one, and the size of the vocabulary."""
    if name is not None:
        from transformers import AutoTokenizer

        ready = AutoTokenizer.from_pretrained(name)
        ready.save_pretrained(folder)
        return lambda rows: ready(rows, verbose=False)["input_ids"], ready.eos_token_id, len(ready)
    trained = train_bpe(
        (row for batch in corpus.splits["train"].iter(ROWS_AT_ONCE) for row in batch["text"]), vocabulary
    )
    trained.save(str(folder / "tokenizer.json"))
    return (
        lambda rows: [encoding.ids for encoding in trained.encode_batch(rows)],
        trained.token_to_id(SEPARATOR),
        trained.get_vocab_size(),
    )
