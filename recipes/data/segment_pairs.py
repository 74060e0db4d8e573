"""Pairs of segments with masked tokens, as BERT is trained on (Devlin et al., 2019, section 3.1)."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from recipes.data import choice, documents, files, vocabulary
from recipes.data.documents import Documents
from recipes.data.loading import Draw, draw_of, generator
from recipes.data.prepared import Prepared
from recipes.data.store import Sequences, kept, write_sequences
from recipes.data.vocabulary import Vocabulary
from recipes.errors import RecipeError

log = logging.getLogger(__name__)

NAME = "wikimedia/wikipedia"
STAND_IN = ("standard_library", "Python's standard library")
SPECIAL = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
AROUND = 3  # [CLS] A [SEP] B [SEP]
FOR_VOCABULARY = 200_000  # sentences that a new tokeniser is trained on
AT_ONCE = 1000
IGNORED = -100
MASKED, REPLACED = 0.8, 0.1  # of the chosen tokens; the rest stays as it is


def hide(
    tokens: NDArray[np.int64],
    places: NDArray[np.intp],
    random: np.random.Generator,
    *,
    vocabulary: int,
    mask: int,
    share: float = 0.15,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Hides some tokens: most behind the mask, some behind any other token, some not at all.

    Args:
        tokens: a whole sequence.
        places: that may be hidden.
        random: decides.
        vocabulary: number of tokens.
        mask: number of the mask token.
        share: of the places that are to be predicted.

    Returns:
        what the model sees, and what it is to predict, `IGNORED` elsewhere.
    """
    chosen = random.permutation(places)[: max(1, round(len(places) * share))]
    seen, labels = tokens.copy(), np.full_like(tokens, IGNORED)
    labels[chosen] = tokens[chosen]
    kind = random.random(len(chosen))
    seen[chosen[kind < MASKED]] = mask
    replaced = chosen[(kind >= MASKED) & (kind < MASKED + REPLACED)]
    seen[replaced] = random.integers(vocabulary, size=len(replaced))
    return seen, labels


class SegmentPairs(Dataset[dict[str, Tensor]]):
    """Two segments, the second one following the first in half of the cases and from anywhere in the others.

    A sample is a run of sentences of one document that fills the length; where the first segment ends, what follows
    it and what is hidden are drawn anew in every epoch.

    Args:
        sentences: all of them, document after document.
        runs: shape [samples, 2]: first sentence of each run, and the one after its last.
        length: tokens in a sample.
        words: the tokeniser.
        masked: share of the tokens that are to be predicted.
        seed: of all that is drawn.
    """

    def __init__(
        self,
        sentences: Sequences,
        runs: NDArray[np.int64],
        length: int,
        words: Vocabulary,
        masked: float,
        seed: int,
    ) -> None:
        self.sentences, self.runs, self.length = sentences, runs, length
        self.special, self.seed = dict(words.special), seed
        self.hide = partial(hide, vocabulary=words.size, mask=words.special["mask"], share=masked)

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, key: Draw | int) -> dict[str, Tensor]:
        draw = draw_of(key)
        random = generator(self.seed, draw)
        start, end = self.runs[draw.sample]
        middle = random.integers(start + 1, end) if end - start > 1 else end
        follows = middle < end and random.random() < 0.5
        first = self._segment(start, middle)
        second = self._segment(middle, end) if follows else self._elsewhere(draw.sample, random)
        tokens, segments = self._join(*_shortened(first, second, self.length - AROUND, random))
        inside = np.flatnonzero((tokens != self.special["cls"]) & (tokens != self.special["sep"]))
        seen, labels = self.hide(tokens, inside, random)
        padding = self.length - len(tokens)
        return {
            "input_ids": torch.from_numpy(np.pad(seen, (0, padding), constant_values=self.special["pad"])),
            "token_type_ids": torch.from_numpy(np.pad(segments, (0, padding))),
            "attention_mask": torch.from_numpy(np.pad(np.ones_like(tokens), (0, padding))),
            "labels": torch.from_numpy(np.pad(labels, (0, padding), constant_values=IGNORED)),
            "next_sentence_label": torch.tensor(0 if follows else 1),
        }

    def _segment(self, start: int, end: int) -> NDArray[np.int64]:
        return np.concatenate([self.sentences[index] for index in range(start, end)]).astype(np.int64)

    def _elsewhere(self, sample: int, random: np.random.Generator) -> NDArray[np.int64]:
        other = int(random.integers(len(self.runs) - 1))
        start, end = self.runs[other + (other >= sample)]
        return self._segment(int(random.integers(start, end)), end)

    def _join(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        cls, sep = ([self.special[role]] for role in ("cls", "sep"))
        tokens = np.concatenate([cls, first, sep, second, sep]).astype(np.int64)
        segments = (np.arange(len(tokens)) >= len(first) + 2).astype(np.int64)
        return tokens, segments


def _shortened(
    first: NDArray[np.int64], second: NDArray[np.int64], length: int, random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Takes tokens from the front or the end of the longer segment until both fit."""
    while (surplus := len(first) + len(second) - length) > 0:
        longer, other = (first, second) if len(first) > len(second) else (second, first)
        cut = min(surplus, max(1, len(longer) - len(other)))
        shorter = longer[cut:] if random.random() < 0.5 else longer[:-cut]
        first, second = (shorter, second) if longer is first else (first, shorter)
    return first, second


def runs_of(lengths: NDArray[np.integer], ends: NDArray[np.integer], length: int) -> NDArray[np.int64]:
    """Divides every document into runs of sentences, each just long enough to fill a sample.

    Args:
        lengths: tokens in every sentence.
        ends: for every document the sentence after its last.
        length: tokens to fill.

    Returns:
        shape [runs, 2]: first sentence, and the one after the last.

    Example:
        >>> runs_of(np.array([4, 4, 4, 9, 2]), np.array([3, 5]), length=8).tolist()
        [[0, 2], [2, 3], [3, 4], [4, 5]]
    """
    runs, start = array("q"), 0
    for end in map(int, ends):
        filled = 0
        for sentence in range(start, end):
            filled += int(lengths[sentence])
            if filled >= length or sentence == end - 1:
                runs.extend((start, sentence + 1))
                start, filled = sentence + 1, 0
    return np.array(runs, dtype=np.int64).reshape(-1, 2)


@dataclass(kw_only=True, eq=False, repr=False)
class MaskedPairs(Prepared):
    """Wikipedia, local text, or Python's standard library, in pairs of segments with masked tokens.

    Args:
        source: "auto", "hub", "files" or "standard_library".
        files: folder with ``train*.txt`` and ``valid*.txt``: a sentence on a line, an empty line between documents; or
            Wikipedia's XML dump, a folder that WikiExtractor has filled, or other formats of `documents.local_files`.
        configuration: of the data set on the hub.
        documents: how many to take where there is no ``train*`` beside ``valid*``; None takes all.
        length: tokens in a sample.
        masked: share of the tokens that are to be predicted.
        seed: of the order, the pairs and the masks.
    """

    source: Literal["auto", "hub", "files", "standard_library"] = "auto"
    name: str = NAME
    configuration: str = "20231101.en"
    documents: int | None = None
    vocabulary: int = 30522
    length: int = 128
    masked: float = 0.15
    batch_size: int = 32
    special = SPECIAL

    @override
    def prepare(self) -> Path:
        source = choice.choose(self.source, self.files, self.name, NAME, STAND_IN)
        readers: dict[str, Callable[[], Documents]] = {
            "hub": lambda: documents.hub(self.name, self.configuration, self.documents),
            "files": lambda: documents.local_files(files.chosen(self.files, self.name), self.documents),
            "standard_library": documents.standard_library,
        }
        text = readers[source]()
        folder = kept(Path(self.cache, "pairs"), text, tokenise, self.vocabulary, self.tokenizer, self.length)
        counts = [len(Sequences(folder / split)) for split in ("train", "validation")]
        log.info("Text: %s; %s sentences for training, %s for validation.", text.title, *(f"{n:,}" for n in counts))
        return folder

    @override
    def split(self, name: str) -> SegmentPairs:
        sentences, words = Sequences(self.folder / name), self.words
        runs = np.load(self.folder / f"{name}.runs.npy", mmap_mode="r")
        if len(runs) < 2:
            raise RecipeError(
                f"The {name} split has {len(runs)} runs of {self.length} tokens; at least 2 are needed for pairs.",
                hint="Use more text, or a smaller data.length.",
            )
        return SegmentPairs(sentences, runs, self.length, words, self.masked, self.seed)


def tokenise(text: Documents, size: int, tokenizer: str | None, length: int, folder: Path) -> None:
    """Tokenises documents sentence by sentence.

    Args:
        text: the documents.
        size: number of tokens of a new tokeniser.
        tokenizer: a ready one instead.
        length: tokens in a sample.
        folder: gets the tokeniser and, for both splits, the sentences and their runs.
    """
    sentences = (sentence for document in text.splits["train"]() for sentence in document)
    words = vocabulary.make(islice(sentences, FOR_VOCABULARY), size, tokenizer, SPECIAL, folder)
    for split, read in text.splits.items():
        ends: list[int] = []
        write_sequences(folder / split, _tokens(read(), words, ends))
        lengths = Sequences(folder / split).lengths
        np.save(folder / f"{split}.runs.npy", runs_of(lengths, np.array(ends, dtype=np.int64), length - AROUND))


def _tokens(text: Iterable[documents.Document], words: Vocabulary, ends: list[int]) -> Iterator[list[int]]:
    """Yields every sentence's tokens; adds to ``ends`` for every document the number of sentences up to its end."""
    count = 0
    for document in text:
        for start in range(0, len(document), AT_ONCE):
            yield from words.encode(document[start : start + AT_ONCE])
        count += len(document)
        ends.append(count)
