"""Pairs of sentences to translate, drawn from several languages, as a LightningDataModule."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from recipes.data import catalogues, choice, files, parallel, vocabulary
from recipes.data.loading import Draw, Order, draw_of
from recipes.data.parallel import Pair, Parallel
from recipes.data.prepared import Prepared
from recipes.data.store import Sequences, kept, write_sequences
from recipes.data.vocabulary import Vocabulary
from recipes.errors import RecipeError

log = logging.getLogger(__name__)

NAME = "Helsinki-NLP/opus-100"
STAND_IN = ("catalogues", "messages of this machine's programs and their translations")
SPECIAL = {"pad": "<pad>", "bos": "<s>", "eos": "</s>"}
FOR_VOCABULARY = 500_000  # pairs of every language that a new tokeniser is trained on
AT_ONCE = 1000


def probabilities(sizes: Sequence[int], temperature: float) -> list[float]:
    """How often each language is drawn: proportional to (its share of all pairs) to the power of 1 / temperature.

    Temperature 1 leaves languages as frequent as they are; a high one makes them all alike, so that those with few
    pairs are seen as well.

    Example:
        >>> [round(p, 2) for p in probabilities((900, 100), temperature=2.0)]
        [0.75, 0.25]
    """
    powers = [(size / sum(sizes)) ** (1 / temperature) for size in sizes]
    return [power / sum(powers) for power in powers]


def drawn(samples: int, seed: int, epoch: int, *, sizes: Sequence[int], temperature: float) -> NDArray[np.int64]:
    """The order of an epoch, which has as many draws as there are pairs.

    A language's pairs come in shuffled order, and all of them before any comes again.

    Args:
        samples: of an epoch.
        seed: decides, with the epoch.
        epoch: its number.
        sizes: pairs of every language; languages are one after the other.
        temperature: as for `probabilities`.
    """
    random = np.random.default_rng([seed, epoch])
    languages = random.choice(len(sizes), size=samples, p=probabilities(sizes, temperature))
    order = np.empty(samples, dtype=np.int64)
    start = 0
    for language, size in enumerate(sizes):
        places = np.flatnonzero(languages == language)
        rounds = [random.permutation(size) for _ in range(-(-len(places) // size))]
        order[places] = start + np.concatenate([np.empty(0, np.int64), *rounds])[: len(places)]
        start += size
    return order


class Translations(Dataset[dict[str, Tensor]]):
    """Pairs as token numbers, both ending with the end token.

    Args:
        sources: of all languages, one after the other.
        targets: as many.
        length: longest source and target in tokens; what is longer is cut off.
        end: number of the end token.
    """

    def __init__(self, sources: Sequences, targets: Sequences, length: int, end: int) -> None:
        self.sources, self.targets, self.length, self.end = sources, targets, length, end

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, key: Draw | int) -> dict[str, Tensor]:
        index = draw_of(key).sample
        return {"source": self._ended(self.sources[index]), "target": self._ended(self.targets[index])}

    def _ended(self, tokens: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.append(tokens[: self.length - 1], self.end).astype(np.int64))


def collated(pairs: Sequence[dict[str, Tensor]], *, pad: int, begin: int) -> dict[str, Tensor]:
    """Pads a list of pairs to a batch.

    Args:
        pairs: with source and target.
        pad: number of the padding token.
        begin: number of the token that the target begins with.

    Returns:
        ``source`` and ``labels`` are padded; ``mask`` is true where the source is not; ``target`` is what the decoder
        sees: the labels one place later, after the begin token. ``mean_length`` is the mean number of labels, the same
        for every pair: losses summed over labels and divided by it have as their mean over pairs the loss per label of
        the whole batch, however it is divided.
    """
    source = _padded([pair["source"] for pair in pairs], pad)
    labels = _padded([pair["target"] for pair in pairs], pad)
    target = torch.cat([torch.full((len(pairs), 1), begin), labels[:, :-1]], dim=1)
    mean = sum(len(pair["target"]) for pair in pairs) / len(pairs)
    return {
        "source": source,
        "mask": source != pad,
        "target": target,
        "labels": labels,
        "mean_length": torch.full((len(pairs),), mean),
    }


def _padded(rows: Sequence[Tensor], pad: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=pad)


@dataclass(kw_only=True, eq=False, repr=False)
class ParallelText(Prepared):
    """OPUS-100, local files, or this machine's message catalogues.

    Args:
        source: "auto", "hub", "files" or "catalogues".
        files: folder with files such as ``train.de-en.de`` and ``train.de-en.en``.
        pairs: pairs of languages such as "de-en", all to the same language; "*-en" are all that ``files`` has.
        temperature: of the sampling over languages.
        vocabulary: number of tokens, all languages together, for which the model is built.
        length: longest source and target in tokens.
    """

    source: Literal["auto", "hub", "files", "catalogues"] = "auto"
    name: str = NAME
    pairs: tuple[str, ...] = ("de-en", "fr-en")
    temperature: float = 5.0
    vocabulary: int = 64_000
    length: int = 128
    batch_size: int = 32
    special = SPECIAL

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature < 1:
            told = f"data.temperature={self.temperature} is less than 1."
            raise RecipeError(told, hint="1 leaves languages as they are.")

    @override
    def prepare(self) -> Path:
        source = choice.choose(self.source, self.files, self.name, NAME, STAND_IN)
        readers: dict[str, Callable[[], Parallel]] = {
            "hub": lambda: parallel.hub(self.name, self.pairs),
            "files": lambda: parallel.local_files(files.chosen(self.files, self.name), self.pairs),
            "catalogues": lambda: catalogues.messages(self.pairs),
        }
        texts = readers[source]()
        folder = kept(Path(self.cache, "translation"), texts, tokenise, self.vocabulary, self.tokenizer)
        sizes = json.loads((folder / "train.sizes.json").read_text())
        counts = ", ".join(f"{size:,} {name}" for name, size in zip(sorted(texts.splits["train"]), sizes, strict=True))
        log.info("Texts: %s; pairs for training: %s.", texts.title, counts)
        return folder

    @override
    def split(self, name: str) -> Translations:
        sources, targets = (Sequences(self.folder / f"{name}_{side}") for side in ("source", "target"))
        return Translations(sources, targets, self.length, self.words.special["eos"])

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()

    @property
    @override
    def order(self) -> Order:
        sizes = json.loads((self.folder / "train.sizes.json").read_text())
        return partial(drawn, sizes=sizes, temperature=self.temperature)

    @property
    @override
    def collate(self) -> Callable[[list[Any]], Any]:
        special = self.words.special
        return partial(collated, pad=special["pad"], begin=special["bos"])


def tokenise(texts: Parallel, size: int, tokenizer: str | None, folder: Path) -> None:
    """Tokenises pairs of all languages, one language after the other.

    Args:
        texts: the pairs.
        size: number of tokens of a new tokeniser.
        tokenizer: a ready one instead.
        folder: gets the tokeniser and, for both splits, sources, targets, and the pairs of every language.
    """
    pairs = (islice(read(), FOR_VOCABULARY) for read in texts.splits["train"].values())
    words = vocabulary.make(chain.from_iterable(chain.from_iterable(pairs)), size, tokenizer, SPECIAL, folder)
    for split, languages in texts.splits.items():
        sizes: list[int] = []
        for side in ("source", "target"):
            sizes.clear()
            write_sequences(folder / f"{split}_{side}", _tokens(texts, split, side, words, sizes))
        if min(sizes) == 0:
            empty = sorted(languages)[sizes.index(0)]
            raise RecipeError(
                f"The {split} split of {texts.title} has no pairs of {empty}.", hint="Check the texts, or data.pairs."
            )
        (folder / f"{split}.sizes.json").write_text(json.dumps(sizes))


def _tokens(texts: Parallel, split: str, side: str, words: Vocabulary, sizes: list[int]) -> Iterator[list[int]]:
    """Yields one side of every pair; adds to ``sizes`` the number of pairs of every language."""
    for _, read in sorted(texts.splits[split].items()):
        pairs: Iterator[Pair] = read()
        count = 0
        while some := [getattr(pair, side) for pair in islice(pairs, AT_ONCE)]:
            count += len(some)
            yield from words.encode(some)
        sizes.append(count)
